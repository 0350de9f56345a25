# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The base class of all action plugins, which do the module's work on the control node if possible."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from ansible.errors import AnsibleActionSkip, AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.errors import UnsupportedError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.path import unfrackpath
from ansible.utils.sentinel import Sentinel
from ansible.utils.unsafe_proxy import wrap_var
from ansible_collections.grove.sandbox.plugins.module_utils._client import DEFAULT_URL, Address
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._info import Listing
from ansible_collections.grove.sandbox.plugins.module_utils._module import (
    TOKEN_VARIABLE,
    URL_VARIABLE,
    make_argument_spec,
)
from ansible_collections.grove.sandbox.plugins.module_utils._run import (
    OPENED_KEY,
    PLAN_KEY,
    SESSION_KEY,
    make_failure_result,
    run,
)
from ansible_collections.grove.sandbox.plugins.plugin_utils import _check_run, _plan_journal
from ansible_collections.grove.sandbox.plugins.plugin_utils._operator import OperatorTask
from ansible_collections.grove.sandbox.plugins.plugin_utils._plan_journal import load_applied_plan

if TYPE_CHECKING:
    from ansible.playbook.task import Task
    from ansible.template import Templar
    from ansible_collections.grove.sandbox.plugins.module_utils._kinds import ResourceKind

CONNECTION_PLUGIN_NAME = "grove.sandbox.sandbox"
"""The name of the connection plugin for sandboxes."""
FILE_OPTIONS = ("dockerfile", "export_to", "import_from")
"""Options with the path of a file on the host where the module runs."""
DESTINATION_OPTIONS = ("gateway_url", "ca_path", "validate_certs")
"""Options that decide where the API key is sent."""


def _is_always_in_check_mode(task: Task, templar: Templar, task_vars: dict[str, Any]) -> bool:
    """Return whether a keyword puts the task in check mode even in a real run.

    The innermost keyword takes precedence. Facts and registered results have the values of this run.
    """
    source = task.get_ds()
    # The attribute of the task itself has already been replaced by its value in this run.
    own_value = source.get("check_mode", Sentinel) if isinstance(source, dict) else Sentinel
    inherited_value = task._get_parent_attribute("check_mode", omit=True)
    templar = templar.copy_with_new_env(available_variables={**task_vars, "ansible_check_mode": False})
    omitted_value = task_vars.get("omit", Sentinel)
    try:
        # ansible-core 2.19 and later remove omitted values from mappings, and earlier releases return a placeholder.
        value = (
            templar.template({"own": own_value}).get("own", omitted_value)
            if own_value is not Sentinel
            else omitted_value
        )
        if own_value is Sentinel or value == omitted_value:
            value = templar.template(inherited_value) if inherited_value is not Sentinel else False
        return bool(boolean(value))
    except (AnsibleError, TypeError):  # The value cannot be known, so later tasks must see the changes.
        return False


def _create_untrusted_destination_error(option: str, value: Any) -> Failure:
    """Return the error for an entry of DESTINATION_OPTIONS whose value comes from a task result."""
    remedies = [f"set {option} using only inventory variables, play variables or -e"]
    if option == "gateway_url":
        remedies.append(f"set the environment variable {URL_VARIABLE} of the control node to this URL")
    remedies.append("set gateway_token in this task")
    return Failure(
        f"{option} of this task is {str(value)[:200]!r}, which comes from a fact or another task result, so the key in "
        f"the environment variable {TOKEN_VARIABLE} is not used: {', or '.join(remedies)}"
    )


class GatewayAction(ActionBase):
    """An action that works in this process if possible, or else runs the module of the same name on the managed host.

    Working in this process is much faster, but requires access to the module's gateway; see ``_can_run_in_process``.
    """

    resource_kind: ResourceKind
    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        del tmp
        task_vars = task_vars or {}
        args = self._prepare_arguments(task_vars)
        with contextlib.ExitStack() as stack:
            try:
                self._check_key_destination(args, task_vars)
                args.update(self._find_approval(task_vars, stack))
            except Failure as failure:
                result.update(make_failure_result(failure))
            else:
                self._run_task(result, args, task_vars)
        # The result contains text from gateways and sandboxes, which must not be evaluated as a Jinja template.
        return dict(wrap_var(result))

    def _run_task(self, result: dict[str, Any], args: dict[str, Any], task_vars: dict[str, Any]) -> None:
        """Do the module's work, and add its result to ``result``."""
        if self._can_run_in_process(args):
            result.update(self._run_in_process(args))
        elif self._connection.transport == CONNECTION_PLUGIN_NAME:
            self._run_in_sandbox(result, args, task_vars)
            return
        else:
            result.update(self._run_as_module(args, task_vars))
        self._record_session(result, args)
        self._record_plan(result, args, task_vars)

    def _run_in_sandbox(self, result: dict[str, Any], args: dict[str, Any], task_vars: dict[str, Any]) -> None:
        """Run the module in a sandbox, and add its result to ``result``, but do not rely on it.

        Root in the sandbox can read the module's arguments and return anything.
        """
        if not self._task.args.get("gateway_token"):
            args.pop("gateway_token", None)  # Do not pass this process's key there.
        try:
            result.update(self._run_as_module(args, task_vars))
        except AnsibleActionSkip:
            # Only the check-mode run skips the task.
            self._record_plan({"changed": True}, args, task_vars, is_in_sandbox=True)
            raise
        for key in (SESSION_KEY, PLAN_KEY):
            result.pop(key, None)
        self._record_plan(result, args, task_vars, is_in_sandbox=True)

    def _run_as_module(self, args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        wrap_async = bool(self._task.async_val) and not self._connection.has_native_async
        return dict(self._execute_module(module_args=args, task_vars=task_vars, wrap_async=wrap_async))

    def _prepare_arguments(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        """Return the task's options, with the URL and the key from this process's environment as defaults.

        Variables in the task's ``environment`` take precedence, because the module reads them itself.
        """
        args = {**self._task.args, "from_action_plugin": True}
        environment = self._merge_environment()
        for option, variable in (("gateway_url", URL_VARIABLE), ("gateway_token", TOKEN_VARIABLE)):
            if args.get(option) is None and os.environ.get(variable) and variable not in environment:
                args[option] = os.environ[variable]
        if self._task.check_mode and _check_run.is_check_run():
            # A single task in check mode, within a real run, must see the changes of that run instead.
            args["check_run"] = _check_run.make_run_name()
            args["check_sessions"] = _check_run.read_openings()
            args["predict_only"] = _is_always_in_check_mode(self._task, self._templar, task_vars)
            # Ansible registers the module's result of an asynchronous task unchanged.
            args["is_async"] = bool(self._task.async_val)
            _check_run.record_session()
        return args

    def _find_approval(self, task_vars: dict[str, Any], stack: contextlib.ExitStack) -> dict[str, Any]:
        """Return the option with this task's entries of the applied plan, if the run applies one. Raises Failure.

        Until ``stack`` exits, no other host can use these entries.
        """
        if isinstance(self.resource_kind, Listing) or (plan := load_applied_plan()) is None:
            return {}
        if _check_run.is_check_run():
            raise Failure("a check-mode run cannot apply a plan: run the playbook without --check, or without the plan")
        if self._task.check_mode:
            return {}
        if self._task.async_val:
            raise Failure("a task with async cannot be part of an applied plan: remove async, or do not apply a plan")
        return {"approved_plan": stack.enter_context(_plan_journal.task_approved(plan, self._make_task_key(task_vars)))}

    def _record_session(self, result: dict[str, Any], args: dict[str, Any]) -> None:
        """Record the plan session or applied run that the task has used, so that this host can end it after the run."""
        opening = result.pop(OPENED_KEY, None)
        if isinstance(opening, list) and len(opening) == 2 and self._connection.transport != CONNECTION_PLUGIN_NAME:
            _check_run.record_opening(*opening)
        session = result.pop(SESSION_KEY, None)
        if not isinstance(session, str) and not args.get("is_async"):
            return
        environment = self._merge_environment()
        url = str(args.get("gateway_url") or environment.get(URL_VARIABLE) or DEFAULT_URL)
        if self._connection.transport != "local" and Address(url).is_local:
            return  # Only the managed host can reach this gateway.
        reference = {
            "url": url,
            "token": str(args.get("gateway_token") or environment.get(TOKEN_VARIABLE) or ""),
            "ca_path": unfrackpath(args["ca_path"], follow=False) if args.get("ca_path") else "",
            "validate_certs": boolean(args.get("validate_certs", True)),
        }
        if args.get("is_async"):
            _check_run.record_run_session(reference)
        else:
            _check_run.record_open_session({**reference, "session": session})

    def _record_plan(
        self, result: dict[str, Any], args: dict[str, Any], task_vars: dict[str, Any], *, is_in_sandbox: bool = False
    ) -> None:
        """Add the task to the plan of a check-mode run, or record the entry of the applied plan that it has used."""
        entry = result.pop(PLAN_KEY, None)
        if args.get("approved_plan") is not None:
            if entry is not None:
                _plan_journal.mark_entry_used(entry)
        elif _check_run.is_check_run() and not args.get("predict_only") and not isinstance(self.resource_kind, Listing):
            task = {"task": self._task.get_name(), **self._make_task_key(task_vars)}
            if entry is not None and not self._task.no_log:
                _plan_journal.add_entry({**entry, **task})
            elif reason := self._find_problem(entry, result, is_in_sandbox=is_in_sandbox):
                problem = _plan_journal.describe_unknown_changes(task["task"], task["path"], reason)
                _plan_journal.add_entry({**task, "problem": problem})

    def _find_problem(self, entry: dict[str, Any] | None, result: dict[str, Any], *, is_in_sandbox: bool) -> str:
        """Return why the plan of a check-mode run cannot contain the task, or "" if a run would not change anything."""
        if entry is not None:
            # Even an entry without changes contains names that no_log hides.
            is_needed = entry["actions"] or entry["failure"] is not None or entry["unknown"]
            return _plan_journal.NO_LOG_REASON if is_needed else ""
        if is_in_sandbox:
            reason = "its module runs inside a sandbox, which can report anything: add delegate_to: localhost"
            return reason if self._task.check_mode or result.get("changed") else ""
        if not self._task.check_mode:
            reason = "it has check_mode: false, so it made its changes during the check-mode run"
            return reason if result.get("changed") else ""
        if self._task.async_val:
            return "it is asynchronous"
        if (result.get("failure") or {}).get("kind") == "invalid":
            return ""  # The options are invalid.
        if self._task.no_log:
            return _plan_journal.NO_LOG_REASON
        return result.get("msg") or "the gateway is too old to have plan sessions"

    def _make_task_key(self, task_vars: dict[str, Any]) -> dict[str, str]:
        """Return the host and the location of this task, which identify its entry in the plan of a check-mode run."""
        return {"host": str(task_vars.get("inventory_hostname", "")), "path": _plan_journal.make_task_path(self._task)}

    def _merge_environment(self) -> dict[str, Any]:
        """Return the task's ``environment`` as one mapping."""
        variables: dict[str, Any] = {}
        for each in self._task.environment or ():
            variables.update(each or {})
        return variables

    def _check_key_destination(self, args: dict[str, Any], task_vars: dict[str, Any]) -> None:
        """Raise Failure if a task result would decide where the key in this process's environment is sent."""
        environment = self._merge_environment()
        if not os.environ.get(TOKEN_VARIABLE) or self._task.args.get("gateway_token") is not None:
            return
        if TOKEN_VARIABLE in environment:
            return
        task: OperatorTask | None = None
        for option in DESTINATION_OPTIONS:
            value = self._task.args.get(option)
            is_from_environment = option == "gateway_url" and value is None and URL_VARIABLE in environment
            if is_from_environment:
                value = environment[URL_VARIABLE]
            if value is None or (option == "gateway_url" and value == os.environ.get(URL_VARIABLE)):
                continue
            task = task or OperatorTask(self._task, task_vars["hostvars"])
            is_from_operator = (
                task.has_environment_variable(URL_VARIABLE, value)
                if is_from_environment
                else task.has_option(option, value)
            )
            if not is_from_operator:
                raise _create_untrusted_destination_error(option, value)

    def _can_run_in_process(self, args: dict[str, Any]) -> bool:
        """Return whether this process reaches the same gateway that the module would reach on the managed host."""
        if any(args.get(option) for option in FILE_OPTIONS):
            return False  # The file is on the managed host.
        if self._task.async_val or self._play_context.become or self._task.become or any(self._task.environment or ()):
            return False
        if self._connection.transport == "local":
            return True
        if self._task.delegate_to or args.get("ca_path"):
            return False
        try:
            return not Address(str(args.get("gateway_url") or DEFAULT_URL)).is_local
        except Failure:
            return False

    def _run_in_process(self, args: dict[str, Any]) -> dict[str, Any]:
        rules = self.resource_kind.RULES
        validation = ArgumentSpecValidator(
            make_argument_spec(self.resource_kind),
            mutually_exclusive=rules.get("mutually_exclusive"),
            required_together=rules.get("required_together"),
            required_one_of=rules.get("required_one_of"),
            required_if=rules.get("required_if"),
            required_by=rules.get("required_by"),
        ).validate(args)
        if validation.error_messages:
            return make_failure_result(Failure("; ".join(map(self._format_validation_message, validation.errors))))
        result = run(self.resource_kind, validation.validated_parameters, check_mode=self._task.check_mode)
        if not self._task.diff:
            result.pop("diff", None)
        return result

    def _format_validation_message(self, error: Exception) -> str:
        """Return the message that the module would report for the error."""
        prefix = (
            f"Unsupported parameters for ({self._task.action}) module: " if isinstance(error, UnsupportedError) else ""
        )
        return f"{prefix}{error}"
