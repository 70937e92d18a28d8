"""Fuzzing: whatever bytes stand in a file or come over a wire, the answer is a value or a typed
error.

    python -m tests.fuzz record --seconds 600

wants atheris, which `make slow` installs. What it finds goes to corpus/record.txt by `--take FILE`.
"""
