"""rctl(8), with the messages of usr.bin/rctl/rctl.c and the semantics of sys/kern/kern_{rctl,racct}.c."""

from __future__ import annotations

import errno
import os
import time

from shim import base, limits, prison

USAGE = "usage: rctl [ -h ] [-a rule | -l filter | -r filter | -u filter | filter]"
SUBJECTS = ("process", "user", "loginclass", "jail")
ABBREVIATIONS = {"u": "user", "g": "group", "p": "process", "l": "loginclass", "c": "loginclass", "class": "loginclass"}
RESOURCES = (
    "cputime datasize stacksize coredumpsize memoryuse memorylocked maxproc openfiles vmemoryuse pseudoterminals "
    "swapuse nthr msgqqueued msgqsize nmsgq nsem nsemop nshm shmsize wallclock pcpu readbps writebps readiops writeiops"
).split()
ACTIONS = (
    "sighup sigint sigquit sigill sigtrap sigabrt sigemt sigfpe sigkill sigbus sigsegv sigsys sigpipe sigalrm sigterm "
    "sigurg sigstop sigtstp sigchld sigttin sigttou sigio sigxcpu sigxfsz sigvtalrm sigprof sigwinch siginfo sigusr1 "
    "sigusr2 sigthr deny log devctl throttle"
).split()
# kern_racct.c racct_types[]: neither deniable nor one of the two exceptions of rctl_rule_add()
RESOURCES_WITHOUT_DENY = {"cputime", "wallclock", "readbps", "writebps", "readiops", "writeiops"}
THROTTLED_RESOURCES = {"readbps", "writebps", "readiops", "writeiops"}


class RuleRefused(Exception):
    """The system call for a rule failed with the errno ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class MalformedRule(Exception):
    """A rule is malformed. The error has been printed."""


class Rule:
    """A rule, or a filter whose empty fields match all values."""

    def __init__(self, text: str) -> None:
        """Parse a rule. Raises RuleRefused(EINVAL). See rctl_string_to_rule()."""
        subject, _, rest = text.partition(":")
        name, _, rest = rest.partition(":")
        resource, _, rest = rest.partition(":")
        end = min((position for position in (rest.find("="), rest.find("/")) if position >= 0), default=len(rest))
        action, amount = rest[:end], rest[end + 1 :] if rest[end : end + 1] == "=" else ""
        amount, _, per = amount.partition("/") if amount else (amount, "", rest[end + 1 :] if end < len(rest) else "")
        self.subject, self.name, self.resource = subject.lower(), name, resource.lower()
        self.action, self.amount, self.per = action.lower(), amount, per.lower()
        for value, allowed in (
            (self.subject, SUBJECTS),
            (self.resource, RESOURCES),
            (self.action, ACTIONS),
            (self.per, SUBJECTS),
        ):
            if value and value not in allowed:
                raise RuleRefused(errno.EINVAL)
        if self.name and not self.subject:
            raise RuleRefused(errno.EINVAL)

    def is_complete(self) -> bool:
        return bool(self.subject and self.name and self.resource and self.action and self.amount and self.per)

    def fields(self) -> list[str]:
        return [self.subject, self.name, self.resource, self.action, self.amount, self.per]

    def matches(self, fields: list[str]) -> bool:
        return all(not pattern or pattern == value for pattern, value in zip(self.fields(), fields, strict=True))


def format_rule(fields: list[str], human_readable: bool) -> str:
    subject, name, resource, action, amount, per = fields
    amount_text = humanize(int(amount)) if human_readable else amount
    return f"{subject}:{name}:{resource}:{action}={amount_text}" + (f"/{per}" if per != subject else "")


def humanize(number: int) -> str:
    """Format a number like humanize_number(3) with HN_AUTOSCALE and HN_DECIMAL in five characters."""
    value = float(number)
    for unit in ("", "K", "M", "G", "T", "P"):
        if value < 1000 or unit == "P":
            return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"
        value /= 1024
    return str(number)


def expand_number(text: str, rule: str) -> str:
    """Expand a number with a suffix k, m, g, t, p or e, which stands for a power of 1024. See expand_number(3)."""
    digits = text.rstrip("kKmMgGtTpPeEbB")
    suffix = text[len(digits) :].lower().removesuffix("b")
    if not digits.isdigit() or len(suffix) > 1:
        base.warnx(f"malformed rule '{rule}': invalid numeric value '{text}'")
        raise MalformedRule
    return str(int(digits) << (10 * (" kmgtpe".index(suffix) if suffix else 0)))


def expand_rule(rule: str) -> str:
    """Expand abbreviated subjects and amounts. See expand_rule()."""
    subject, colon, remainder = rule.partition(":")
    if not colon:
        base.warnx(f"malformed rule '{rule}': missing subject")
        raise MalformedRule
    subject = ABBREVIATIONS.get(subject.lower(), "jail" if subject.lower() == "j" else subject)
    if subject in ("user", "group"):
        raise base.unsupported(f"the subject {subject}")
    head, equals, amount = remainder.partition("=")
    if equals and amount.partition("/")[0]:
        number, slash, per = amount.partition("/")
        remainder = f"{head}={expand_number(number, rule)}{slash}{per}"
    return f"{subject}:{remainder}"


def main(argv: list[str]) -> int:
    try:
        options, rules = base.getopt(argv, "ahlnru")
    except base.BadOption:
        raise base.usage(USAGE) from None
    option_letters = {letter for letter, _ in options}
    modes = sorted(option_letters & set("alru"))
    if len(modes) > 1:
        raise base.errx(1, "at most one of -a, -l, -r, or -u may be specified")
    if not rules:
        if modes:
            raise base.usage(USAGE)
        rules = ["::"]
    mode = modes[0] if modes else ""
    if mode == "l":
        raise base.unsupported("-l")
    failure_count = 0
    for rule in rules:
        try:
            expanded_rule = expand_rule(rule)
            require_enabled()
            run_rule(mode, expanded_rule, "h" in option_letters)
        except MalformedRule:
            failure_count += 1
        except RuleRefused as refusal:
            message = {"a": "failed to add rule", "r": "failed to remove rule"}.get(mode, "failed to show rules for")
            message = "failed to show resource consumption for" if mode == "u" else message
            base.warn(f"{message} '{rule}'", refusal.number)
            failure_count += 1
    return failure_count


def require_enabled() -> None:
    """Exit with an error if rctl is disabled. See enosys()."""
    if base.read_knob("kern.racct.enable") != "1":
        raise base.errx(1, "RACCT/RCTL present, but disabled; enable using kern.racct.enable=1 tunable")


def run_rule(mode: str, text: str, human_readable: bool) -> None:
    rule = Rule(text)
    if mode == "a":
        add_rule(rule)
    elif mode == "r":
        remove_rules(rule)
    elif mode == "u":
        print_usage(rule, human_readable)
    else:
        for fields in base.load("rctl", {"rules": []})["rules"]:
            if rule.matches([*fields]):
                base.print_line(format_rule(fields, human_readable))


def add_rule(rule: Rule) -> None:
    """Add a rule. A deny rule replaces one that differs only in the amount. See rctl_rule_add()."""
    rule.per = rule.per or rule.subject
    if not rule.is_complete() or not rule.amount.isdigit():
        raise RuleRefused(errno.EINVAL)
    if rule.subject != "jail" or rule.per != "jail":
        raise base.unsupported("rules for anything but a whole jail")
    if rule.action == "deny" and rule.resource in RESOURCES_WITHOUT_DENY:
        raise RuleRefused(errno.EOPNOTSUPP)
    if rule.action == "throttle" and rule.resource not in THROTTLED_RESOURCES:
        raise RuleRefused(errno.EOPNOTSUPP)
    with base.locked():
        state = base.load("rctl", {"rules": []})
        new_fields = [*rule.fields()]
        remaining_rules = []
        for fields in state["rules"]:
            is_same_limit = fields[:4] == new_fields[:4] and fields[5] == new_fields[5]
            if not (is_same_limit and (rule.action == "deny" or fields[4] == new_fields[4])):
                remaining_rules.append(fields)
        state["rules"] = [*remaining_rules, new_fields]
        base.save("rctl", state)
        enforce_rules(rule.name, state["rules"])


def remove_rules(rule: Rule) -> None:
    """Remove all rules that match. Raises RuleRefused(ESRCH) if there are none. See sys_rctl_remove_rule()."""
    with base.locked():
        state = base.load("rctl", {"rules": []})
        removed_rules = [fields for fields in state["rules"] if rule.matches(fields)]
        if not removed_rules:
            raise RuleRefused(errno.ESRCH)
        state["rules"] = [fields for fields in state["rules"] if fields not in removed_rules]
        base.save("rctl", state)
        for name in {fields[1] for fields in removed_rules}:
            enforce_rules(name, state["rules"])


def enforce_rules(name: str, rules: list[list[str]]) -> None:
    jail_limits = [fields[2:5] for fields in rules if fields[1] == name]
    try:
        pids = prison.list_processes(prison.find_jail(name))
    except prison.JailError:
        pids = []  # A rule may be created before its jail, and remain after the jail is removed.
    limits.apply_rules(name, jail_limits, pids)


# ---- usage ----------------------------------------------------------------------------------------------------------


def print_usage(rule: Rule, human_readable: bool) -> None:
    """Print a jail's usage of every resource, which is 0 if the jail does not exist. See sys_rctl_get_racct()."""
    if rule.subject != "jail" or not rule.name:
        raise RuleRefused(errno.EINVAL) if rule.subject in ("", "jail") else base.unsupported(f"-u {rule.subject}")
    amounts = dict.fromkeys(RESOURCES, 0)
    try:
        jail = prison.find_jail(rule.name)
        amounts.update(measure_usage(jail))
    except prison.JailError:
        pass
    for resource in RESOURCES:
        base.print_line(f"{resource}={humanize(amounts[resource]) if human_readable else amounts[resource]}")


def measure_usage(jail: prison.Jail) -> dict[str, int]:
    """Add up the resource usage of the jail's processes, according to /proc."""
    ticks_per_second, page_size = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    totals = dict.fromkeys(("cputime", "maxproc", "memoryuse", "vmemoryuse", "nthr", "openfiles", "wallclock"), 0)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    cpu_percent = 0.0
    for pid in prison.list_processes(jail):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            file_count = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
        cpu, age = (int(fields[11]) + int(fields[12])) / ticks_per_second, now - int(fields[19]) / ticks_per_second
        totals["cputime"] += int(cpu)
        totals["maxproc"] += 1
        totals["nthr"] += int(fields[17])
        totals["vmemoryuse"] += int(fields[20])
        totals["memoryuse"] += int(fields[21]) * page_size
        totals["openfiles"] += file_count
        totals["wallclock"] += int(age)
        cpu_percent += 100 * cpu / age if age > 0.1 else 0
    return {**totals, "pcpu": int(cpu_percent)}
