"""Commands for plan files, which Ansible writes at the end of a check-mode run. They do not contact a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sandbox_gateway.cli import render
from sandbox_gateway.cli.context import Json, get_settings
from sandbox_gateway.cli.failure import ExitCode

app = typer.Typer(
    help="Show and compare plan files, which `ansible-playbook --check` writes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("show")
def show(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The plan file.")],
    as_json: Json = False,
) -> None:
    """Show the changes of a plan, their totals, and whether the plan can be applied."""
    from sandbox_gateway.cli import plan_file, plan_text

    settings = get_settings(ctx, as_json)
    plan = plan_file.load(file)
    render.print_json(plan_text.convert_plan(plan)) if settings.json else plan_text.print_plan(plan)


@app.command("compare")
def compare(
    ctx: typer.Context,
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A plan file.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another plan file.")],
    as_json: Json = False,
) -> None:
    """Compare two plans. Exit with code 1 if they differ in more than their times."""
    from sandbox_gateway.cli import plan_comparison, plan_file, plan_text

    settings = get_settings(ctx, as_json)
    old_plan, new_plan = plan_file.load(old), plan_file.load(new)
    comparison = plan_comparison.compare(old_plan, new_plan)
    if settings.json:
        render.print_json(plan_text.convert_comparison(comparison))
    else:
        plan_text.print_comparison(comparison, old_plan, new_plan)
    if not comparison.is_equal:
        raise typer.Exit(ExitCode.FAILED)
