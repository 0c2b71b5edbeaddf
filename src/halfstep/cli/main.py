"""`halfstep COMMAND`: dispatch, and errors as one sentence with a remedy instead of a traceback.

Commands are imported when they run, so that `halfstep --help` is quick.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a model; with no configuration, a small GPT on Python's own documentation",
    "plan": "say which precision a model can be trained in here, and which of its modules must stay in fp32",
    "audit": "say which op runs in which format, what that costs, and why 16 bits are not faster here",
    "export": "write the model of a checkpoint as safetensors in fp32, bf16 or fp16",
    "report": "say what one or more runs came to, as one HTML page, as Markdown, or on the terminal",
    "compare": "train in two precisions side by side and name the module where they part",
    "doctor": "say what this device can do and which precision suits it",
}

USAGE = "usage: halfstep COMMAND [options]\n\n{commands}\n\nhalfstep COMMAND --help tells the options of one, halfstep --version the version."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 an error that was explained, 2 wrong usage, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(USAGE.format(commands="\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from halfstep import __version__

        print(f"halfstep {__version__}")
        return 0
    from halfstep.errors import ConfigError, HalfstepError, suggest

    command, rest = arguments[0], arguments[1:]
    try:
        if command not in COMMANDS:
            raise ConfigError(f"halfstep has no command {command!r}", suggest(command, COMMANDS))
        status: int = importlib.import_module(f"halfstep.cli.{command}").main(rest)
    except HalfstepError as error:
        print(f"halfstep: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as stop:
        print(f"halfstep: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
