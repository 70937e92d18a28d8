"""Calls a pickled function in a process of its own.

Run as a script by its path: `python call_runner.py CALL RESULT`.

CALL holds (function, arguments, keyword arguments); RESULT gets ("value", what it returned) or
("error", what it raised), pickled. The exit code is one that every engine understands.
"""

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any


def main(call_path: str, result_path: str) -> int:
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")
    function, arguments, keywords = cloudpickle.loads(Path(call_path).read_bytes())
    code = 0
    kind = "value"
    try:
        value = function(*arguments, **keywords)
    except Exception as error:
        # As where nobody catches it: holdfast says what ends the process, at the process's end.
        vars(sys).update(last_value=error)
        with contextlib.suppress(SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        code = getattr(error, "exit_code", 1)  # of a JobError
        kind = "error"
        value = error
    try:
        data = cloudpickle.dumps((kind, value))
        # Read back: an exception with arguments of its own often cannot be made again.
        cloudpickle.loads(data)
    except Exception as error:  # whatever a class of the user's does here
        code = code or 1
        if kind == "error":
            what = f"the error cannot be pickled; it was {type(value).__name__}: {value}"
        else:
            what = f"the result cannot be pickled: {type(error).__name__}: {error}"
        data = cloudpickle.dumps(("error", TypeError(what)))
    Path(result_path).write_bytes(data)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
