"""The command line in this process."""

import contextlib
import io
import json

from flipper.cli import main


def here(*arguments):
    """Exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code or 0
    return code, out.getvalue(), err.getvalue()


def rows(*arguments):
    """The records that a command prints as JSON lines."""
    code, out, err = here(*arguments, "--format", "jsonl")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]
