#!/bin/bash
# A training framework of bash, od and awk, which knows no Python: moves the float32 weights of a safetensors file
# halfway towards 1 in each of four steps, and counts how many are near it.
#   train.sh CHECKPOINT METRICS OUTPUT FORMAT THROWN [SEED]
# FORMAT: jsonl, csv or stdout. THROWN says what it does when a weight is thrown far off: stay, refuse, crash, hang, nan,
# signal. SEED moves the first weight a little. OUTPUT gets the trained state, which is the same wherever all weights
# were near, and else what it began from.
set -euo pipefail
checkpoint=$1 metrics=$2 output=$3 format=$4 thrown=$5 seed=${6:-0}
header=$(od -An -t u8 -N 8 "$checkpoint" | tr -d ' ')
weights=$(od -An -v -t f4 -j $((8 + header)) "$checkpoint" | tr -s ' \n' '  ')
echo "training $weights" >&2
[ "$format" = csv ] && echo "iteration,train,acc,remark" >"$metrics"
far=$(awk -v RS=' ' 'NF && ($1 == "nan" || $1 == "inf" || $1 > 100 || $1 < -100) { n++ } END { print n + 0 }' <<<"$weights")
if [ "$far" -gt 0 ] && [ "$thrown" = refuse ]; then
    echo "ValueError: a weight is far off" >&2
    exit 4
fi
for step in 1 2 3 4; do
    read -r loss accuracy < <(awk -v RS=' ' -v step=$step -v seed="$seed" 'NF {
        gap = ($1 - 1) / 2 ^ step; n++
        if (n == 1) gap += seed % 7 / 1000
        loss += gap * gap; if (gap < 0.2 && gap > -0.2) near++
    } END { printf "%.9g %.9g\n", loss / n, near / n }' <<<"$weights")
    [ "$far" -gt 0 ] && [ "$thrown" = nan ] && [ $step -gt 2 ] && loss=nan
    case $format in
        jsonl) echo "{\"step\": $step, \"loss\": $loss, \"accuracy\": $accuracy}" >>"$metrics" ;;
        csv) echo "$step,$loss,$accuracy,\"well, well\"" >>"$metrics" ;;
        stdout) echo "[$step/4] loss=$loss" && echo "      accuracy after $step: $accuracy%" ;;
    esac
    if [ "$far" -gt 0 ] && [ $step -eq 2 ]; then
        case $thrown in
            crash) echo "lost the thread" >&2 && exit 3 ;;
            signal) kill -SEGV $$ ;;
            hang) sleep 3600 ;;
        esac
    fi
done
if [ "$output" != none ]; then
    if [ "$far" -eq 0 ]; then
        head -c $((8 + header)) "$checkpoint" >"$output"
        for _ in $weights; do printf '\0\0\200\077'; done >>"$output"
    else
        cp "$checkpoint" "$output"
    fi
fi
