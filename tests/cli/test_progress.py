"""Bars on stderr: on a terminal only, for large files only, gone when the work is done."""

import re
import sys

import pytest
from cli_tools import MLP, on_terminal, strict

from flipper.cli.progress import size_of

LOW = (
    "import sys, flipper.cli, flipper.cli.progress as bars\n"
    "bars.LARGE = 0\n"
    "flipper.cli.main(sys.argv[1:])"
)
"""The command line with bars for every file."""

CURSOR_ON = "\x1b[?25h"
CURSOR_OFF = "\x1b[?25l"


def run(*arguments, **settings):
    command = [sys.executable, "-c", LOW, *map(str, arguments)]
    return on_terminal(command=command, **settings)


def commands(folder):
    return {
        "striking": ["inject", MLP, "-o", folder / "out", "--seed", "1"],
        "converting to hdf5": ["convert", MLP, "-o", folder / "h5", "--to", "hdf5"],
        "comparing": ["diff", MLP, MLP],
        "reading": ["inspect", MLP, "--stats"],
        "checking": ["verify", MLP],
    }


@pytest.mark.parametrize("work", ["striking", "converting to hdf5", "comparing", "reading", "checking"])
def test_long_work_has_a_bar_on_a_terminal_that_goes_away(tmp_path, work):
    code, out, err = run(*commands(tmp_path)[work], out=False)
    assert code == 0
    assert work in err
    assert (err.count(CURSOR_OFF), err.count(CURSOR_ON)) == (1, 1)
    assert "\x1b" not in out
    for line in out.splitlines():
        strict(line)


def test_no_bar_without_a_terminal_with_quiet_or_for_little(tmp_path):
    arguments = commands(tmp_path)["checking"]
    assert CURSOR_OFF not in run(*arguments, err=False)[2]
    assert run(*arguments, "-q")[2] == ""
    assert CURSOR_OFF not in on_terminal(*arguments)[2]


def test_links_that_lead_nowhere_count_nothing(tmp_path):
    """A directory may have them beside its shards; they are no reason to fail."""
    (tmp_path / "shard").write_bytes(bytes(100))
    (tmp_path / "nowhere").symlink_to("missing")
    (tmp_path / "loop").symlink_to("loop")
    assert size_of(tmp_path, None, tmp_path / "shard") == 200


def test_no_color_leaves_the_bar_without_colour(tmp_path):
    err = run(*commands(tmp_path)["comparing"], NO_COLOR="1")[2]
    assert "comparing" in err
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", err)


@pytest.mark.parametrize("style", ["table", "json", "jsonl", "csv"])
def test_the_bar_is_gone_before_rows_come_to_the_same_terminal(style):
    """stdout and stderr are one terminal here, as in life."""
    joined = ["sh", "-c", 'exec "$@" 2>&1', "sh"]
    inspect = [sys.executable, "-c", LOW, "inspect", str(MLP), "--stats", "--format", style]
    code, out, _ = on_terminal(command=joined + inspect)
    assert code == 0
    bar, rows = out.split(CURSOR_ON)
    assert "reading" in bar
    assert "reading" not in rows
    assert bar.count("model.fc1.bias") == 0 or style != "table"
    assert "model.fc3.weight" in rows


def test_an_error_comes_after_the_bar(tmp_path):
    (tmp_path / "text").write_text("x")
    code, _, err = run("verify", tmp_path / "text")
    assert code == 4
    assert err.rindex(CURSOR_ON) < err.index("flipper: error: ")


def test_the_bar_follows_the_bytes_read():
    """Reading half of what was said makes the bar stand at half."""
    code = (
        "import sys, time, flipper.cli.progress as bars\n"
        "with bars.progress('working', 600 << 20, False):\n"
        "    with open('/dev/zero', 'rb', buffering=0) as file:\n"
        "        for _ in range(300): file.read(1 << 20)\n"
        "    time.sleep(0.4)\n"
    )
    found = on_terminal(command=[sys.executable, "-c", code])[2]
    assert re.search(r"300\.\d/600\.0 MiB", found)


def test_ctrl_c_brings_the_cursor_back():
    hang = "bars.LARGE = 0\nimport time, flipper.injection.verify as v\nv.verify = lambda *a: time.sleep(20)\n"
    code = LOW.replace("bars.LARGE = 0\n", hang)
    interrupted = ["timeout", "--foreground", "-s", "INT", "1.5", sys.executable, "-c", code, "verify", str(MLP)]
    err = on_terminal(command=interrupted)[2]
    assert err.count(CURSOR_ON) == 1
    assert "Traceback" not in err


def test_a_reader_that_goes_away_leaves_the_cursor_on():
    shell = f"{sys.executable} -c '{LOW}' inspect {MLP} --stats | true"
    _, _, err = on_terminal(command=["bash", "-c", shell])
    assert err.count(CURSOR_OFF) == err.count(CURSOR_ON)
    assert "Error" not in err
