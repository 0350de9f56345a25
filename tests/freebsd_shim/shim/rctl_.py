"""rctl(8). Messages: usr.bin/rctl/rctl.c; rules: sys/kern/kern_rctl.c; usage: sys/kern/kern_racct.c."""

from __future__ import annotations

import errno
import os
import time

from shim import base, limits, prison

USAGE = "usage: rctl [ -h ] [-a rule | -l filter | -r filter | -u filter | filter]"
SUBJECTS = ("process", "user", "loginclass", "jail")
SHORT = {"u": "user", "g": "group", "p": "process", "l": "loginclass", "c": "loginclass", "class": "loginclass"}
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
UNDENIABLE = {"cputime", "wallclock", "readbps", "writebps", "readiops", "writeiops"}
THROTTLED = {"readbps", "writebps", "readiops", "writeiops"}


class Refused(Exception):
    """The system call's errno."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Malformed(Exception):
    """The error has been printed; the rule counts as failed."""


class Rule:
    """A rule or a filter: empty fields match all."""

    def __init__(self, text: str) -> None:
        """rctl_string_to_rule(). Raises Refused(EINVAL)."""
        subject, _, rest = text.partition(":")
        name, _, rest = rest.partition(":")
        resource, _, rest = rest.partition(":")
        cut = min((at for at in (rest.find("="), rest.find("/")) if at >= 0), default=len(rest))
        action, amount = rest[:cut], rest[cut + 1 :] if rest[cut : cut + 1] == "=" else ""
        amount, _, per = amount.partition("/") if amount else (amount, "", rest[cut + 1 :] if cut < len(rest) else "")
        self.subject, self.name, self.resource = subject.lower(), name, resource.lower()
        self.action, self.amount, self.per = action.lower(), amount, per.lower()
        for value, known in (
            (self.subject, SUBJECTS),
            (self.resource, RESOURCES),
            (self.action, ACTIONS),
            (self.per, SUBJECTS),
        ):
            if value and value not in known:
                raise Refused(errno.EINVAL)
        if self.name and not self.subject:
            raise Refused(errno.EINVAL)

    def complete(self) -> bool:
        return bool(self.subject and self.name and self.resource and self.action and self.amount and self.per)

    def fields(self) -> list[str]:
        return [self.subject, self.name, self.resource, self.action, self.amount, self.per]

    def matches(self, fields: list[str]) -> bool:
        return all(not mine or mine == theirs for mine, theirs in zip(self.fields(), fields, strict=True))


def text_of(fields: list[str], human: bool) -> str:
    subject, name, resource, action, amount, per = fields
    shown = humanize(int(amount)) if human else amount
    return f"{subject}:{name}:{resource}:{action}={shown}" + (f"/{per}" if per != subject else "")


def humanize(number: int) -> str:
    """humanize_number(3) with HN_AUTOSCALE, HN_DECIMAL in five characters."""
    value = float(number)
    for unit in ("", "K", "M", "G", "T", "P"):
        if value < 1000 or unit == "P":
            return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"
        value /= 1024
    return str(number)


def expand_number(text: str, rule: str) -> str:
    """expand_number(3): a suffix k, m, g, t, p, e is a power of 1024."""
    digits = text.rstrip("kKmMgGtTpPeEbB")
    suffix = text[len(digits) :].lower().removesuffix("b")
    if not digits.isdigit() or len(suffix) > 1:
        base.warnx(f"malformed rule '{rule}': invalid numeric value '{text}'")
        raise Malformed
    return str(int(digits) << (10 * (" kmgtpe".index(suffix) if suffix else 0)))


def expand(rule: str) -> str:
    """expand_rule(): short subjects, user names, amounts."""
    subject, colon, rest = rule.partition(":")
    if not colon:
        base.warnx(f"malformed rule '{rule}': missing subject")
        raise Malformed
    subject = SHORT.get(subject.lower(), "jail" if subject.lower() == "j" else subject)
    if subject in ("user", "group"):
        raise base.unsupported(f"the subject {subject}")
    head, equals, amount = rest.partition("=")
    if equals and amount.partition("/")[0]:
        number, slash, per = amount.partition("/")
        rest = f"{head}={expand_number(number, rule)}{slash}{per}"
    return f"{subject}:{rest}"


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
    failures = 0
    for rule in rules:
        try:
            expanded = expand(rule)
            enabled()
            run_rule(mode, expanded, "h" in option_letters)
        except Malformed:
            failures += 1
        except Refused as refusal:
            what = {"a": "failed to add rule", "r": "failed to remove rule"}.get(mode, "failed to show rules for")
            what = "failed to show resource consumption for" if mode == "u" else what
            base.warn(f"{what} '{rule}'", refusal.number)
            failures += 1
    return failures


def enabled() -> None:
    """ENOSYS of every rctl system call → enosys()."""
    if base.knob("kern.racct.enable") != "1":
        raise base.errx(1, "RACCT/RCTL present, but disabled; enable using kern.racct.enable=1 tunable")


def run_rule(mode: str, text: str, human: bool) -> None:
    rule = Rule(text)
    if mode == "a":
        add(rule)
    elif mode == "r":
        remove(rule)
    elif mode == "u":
        usage(rule, human)
    else:
        for fields in base.load("rctl", {"rules": []})["rules"]:
            if rule.matches([*fields]):
                base.say(text_of(fields, human))


def add(rule: Rule) -> None:
    """sys_rctl_add_rule(), rctl_rule_add(); a deny rule replaces one that differs only in the amount."""
    rule.per = rule.per or rule.subject
    if not rule.complete() or not rule.amount.isdigit():
        raise Refused(errno.EINVAL)
    if rule.subject != "jail" or rule.per != "jail":
        raise base.unsupported("rules for anything but a whole jail")
    if rule.action == "deny" and rule.resource in UNDENIABLE:
        raise Refused(errno.EOPNOTSUPP)
    if rule.action == "throttle" and rule.resource not in THROTTLED:
        raise Refused(errno.EOPNOTSUPP)
    with base.locked():
        state = base.load("rctl", {"rules": []})
        same = [*rule.fields()]
        kept = []
        for fields in state["rules"]:
            alike = fields[:4] == same[:4] and fields[5] == same[5]
            if not (alike and (rule.action == "deny" or fields[4] == same[4])):
                kept.append(fields)
        state["rules"] = [*kept, same]
        base.save("rctl", state)
        enforce(rule.name, state["rules"])


def remove(rule: Rule) -> None:
    """sys_rctl_remove_rule(): ESRCH without a match."""
    with base.locked():
        state = base.load("rctl", {"rules": []})
        gone = [fields for fields in state["rules"] if rule.matches(fields)]
        if not gone:
            raise Refused(errno.ESRCH)
        state["rules"] = [fields for fields in state["rules"] if fields not in gone]
        base.save("rctl", state)
        for name in {fields[1] for fields in gone}:
            enforce(name, state["rules"])


def enforce(name: str, rules: list[list[str]]) -> None:
    own = [fields[2:5] for fields in rules if fields[1] == name]
    try:
        pids = prison.processes(prison.find(name))
    except prison.JailError:
        pids = []  # a rule may exist before its jail, and outlive it
    limits.apply(name, own, pids)


# ---- usage ----------------------------------------------------------------------------------------------------------


def usage(rule: Rule, human: bool) -> None:
    """sys_rctl_get_racct(): every resource of the jail; zeros if the jail does not exist."""
    if rule.subject != "jail" or not rule.name:
        raise Refused(errno.EINVAL) if rule.subject in ("", "jail") else base.unsupported(f"-u {rule.subject}")
    amounts = dict.fromkeys(RESOURCES, 0)
    try:
        jail = prison.find(rule.name)
        amounts.update(measure(jail))
    except prison.JailError:
        pass
    for resource in RESOURCES:
        base.say(f"{resource}={humanize(amounts[resource]) if human else amounts[resource]}")


def measure(jail: prison.Jail) -> dict[str, int]:
    """Sums over the jail's processes from /proc."""
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    sums = dict.fromkeys(("cputime", "maxproc", "memoryuse", "vmemoryuse", "nthr", "openfiles", "wallclock"), 0)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    share = 0.0
    for pid in prison.processes(jail):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
        cpu, age = (int(fields[11]) + int(fields[12])) / ticks, now - int(fields[19]) / ticks
        sums["cputime"] += int(cpu)
        sums["maxproc"] += 1
        sums["nthr"] += int(fields[17])
        sums["vmemoryuse"] += int(fields[20])
        sums["memoryuse"] += int(fields[21]) * page
        sums["openfiles"] += files
        sums["wallclock"] += int(age)
        share += 100 * cpu / age if age > 0.1 else 0
    return {**sums, "pcpu": int(share)}
