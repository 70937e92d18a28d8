"""`holdfast prune ROOT --keep RULES`: deletes the steps that no rule keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .common import (
    flag,
    folder_argument,
    json_option,
    print_json,
    progress_bar,
    say,
    sentences,
    single_writer_option,
)

if TYPE_CHECKING:
    from holdfast.checkpoint import KeepPolicy

RULES = "last:N, every:N, closest:N, last-seconds:S, every-seconds:S, best:N:METRIC[:min|:max]"


@click.command(
    epilog="""\b
Examples:
  holdfast prune /ckpt/run7 --keep last:3 --dry-run
  holdfast prune /ckpt/run7 --keep last:3,every:1000,best:2:loss
  holdfast prune /ckpt/run7 --keep best:5:accuracy:max

Exit codes: 0 done, 2 a rule is wrong, 3 nothing there, 5 refused or failed."""
)
@folder_argument("root")
@click.option("--keep", "rules", required=True, help=f"Rules, joined by commas: {RULES}.")
@flag("--dry-run", help="Say what would be deleted, and delete nothing.")
@single_writer_option
@json_option
def prune(root: str, rules: str, dry_run: bool, single_writer: bool, as_json: bool) -> None:
    """Delete the steps of ROOT that none of the rules keeps.

    The newest step always stays, and so do steps that a reader holds, those of Orbax, and damaged
    ones, which no rule counts. Steps that were left behind go first, once there is a step at or
    above their number that was not.
    """
    from holdfast.checkpoint import CheckpointManager, Options
    from holdfast.checkpoint.policy import to_delete, unknown_metrics
    from holdfast.checkpoint.steps.holds import held_steps
    from holdfast.multihost import Solo

    from .roots import Root

    policy = parse_rules(rules)
    with sentences(), progress_bar("looking and deleting", counts=False):
        there = Root(root)
        steps, damaged = there.own_steps()
        going = to_delete(policy, steps, left_behind=there.left_behind)
        held = held_steps(there.storage)
        going = [step for step in going if step not in held]
        if going and not dry_run:
            options = Options(single_writer=single_writer)
            # The group of all processes asks jax for devices, which a job here may hold.
            with CheckpointManager(root, group=Solo(), options=options) as manager:
                going = manager.delete_unheld(going)
    kept = [facts.step for facts in steps if facts.step not in going]
    for sentence in unknown_metrics(policy, steps):
        say(sentence, err=True)
    if as_json:
        print_json({"deleted": going, "kept": kept, "damaged": damaged, "dry_run": dry_run})
        return
    say(f"{'would delete' if dry_run else 'deleted'}: {_listed(going)}")
    say(f"{'would keep' if dry_run else 'kept'}: {_listed(kept)}")
    if damaged:
        say(f"left alone, since they are damaged (`holdfast ls` says how): {_listed(damaged)}")


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "nothing"


def parse_rules(text: str) -> KeepPolicy:
    """Returns the keep policy that the rules of `--keep` mean. UsageError: a rule is wrong."""
    from holdfast.checkpoint import KeepAnyOf

    return KeepAnyOf(*(_parse_rule(rule.strip()) for rule in text.split(",")))


def _parse_rule(rule: str) -> KeepPolicy:
    from holdfast.checkpoint import (
        KeepBest,
        KeepClosestTo,
        KeepEvery,
        KeepEverySeconds,
        KeepLast,
        KeepLatestFor,
    )

    try:
        match rule.split(":"):
            case ["last", count]:
                return KeepLast(int(count))
            case ["every", count]:
                return KeepEvery(int(count))
            case ["closest", count]:
                return KeepClosestTo(int(count))
            case ["last-seconds", seconds]:
                return KeepLatestFor(float(seconds))
            case ["every-seconds", seconds]:
                return KeepEverySeconds(float(seconds))
            case ["best", count, metric]:
                return KeepBest(int(count), metric)
            case ["best", count, metric, "min" | "max" as mode]:
                return KeepBest(int(count), metric, mode=mode)
    except ValueError as error:
        raise click.UsageError(f"--keep {rule}: {error}") from None
    raise click.UsageError(f"--keep {rule}: expected one of {RULES}")
