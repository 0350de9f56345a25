"""The part of pf.conf(5) that the gateway and its host role use: parsed strictly, printed as pfctl(8) prints it.

Grammar: pf.conf(5) "GRAMMAR" and sbin/pfctl/parse.y; printing: sbin/pfctl/pfctl_parser.c print_rule().
"""

from __future__ import annotations

import _socket

from shim import base

Rule = dict  # what, direction, drop, quick, on, af, proto, source, sport, target, dport, state, flags, to, toport, …

# Words of pf.conf(5) that start or continue a rule and that the shim lacks: reported as such, not as syntax errors.
UNBUILT = set(
    "log user group os match scrub altq queue table antispoof load binat binat-anchor route-to reply-to dup-to "
    "tag tagged probability rtable received-on max-mss set-tos allow-opts fragment icmp-type icmp6-type dnpipe dnqueue "
    "return-rst return-icmp return-icmp6 ether include synproxy modulate static-port bitmask random source-hash "
    "sticky-address once divert-to divert-reply timeout limit optimization ruleset-optimization state-policy hostid "
    "require-order fingerprints debug loginterface reassemble no-df tos max max-src-nodes overload".split()
)
KEYWORDS = set(
    "in out quick on inet inet6 proto from to port all any keep no state flags label pass block drop return nat rdr "
    "anchor nat-anchor rdr-anchor set skip".split()
)
ORDER = {"set": 0, "nat": 3, "rdr": 3, "no": 3, "nat-anchor": 3, "rdr-anchor": 3, "anchor": 4, "pass": 4, "block": 4}


class SyntaxProblem(Exception):
    """yyerror(): (line, message)."""

    def __init__(self, line: int, message: str = "syntax error") -> None:
        super().__init__(message)
        self.line, self.message = line, message


class Ruleset:
    """The content of a file: ``nat`` (nat, rdr and their anchors) and ``filter``, in order; the main file's options."""

    def __init__(self) -> None:
        self.nat: list[Rule] = []
        self.filter: list[Rule] = []
        self.skip: list[str] = []
        self.block_return = False


def tokens_of(line: str, number: int) -> list[str]:
    """Words, strings (as ``"text``), and the marks ``{ } ( ) , ! = < > : ->``."""
    found, at = [], 0
    while at < len(line):
        letter = line[at]
        if letter in " \t":
            at += 1
        elif letter == "#":
            break
        elif letter == '"':
            end = line.find('"', at + 1)
            if end < 0:
                raise SyntaxProblem(number)
            found.append(line[at:end])
            at = end + 1
        elif line.startswith("->", at):
            found.append("->")
            at += 2
        elif letter in "{}(),!=<>":
            found.append(letter)
            at += 1
        else:
            end = at
            while end < len(line) and line[end] not in ' \t"{}(),!=<>#' and not line.startswith("->", end):
                end += 1
            found.append(line[at:end])
            at = end
    return found


def parse(text: str, *, main: bool) -> Ruleset:
    """Raises SyntaxProblem."""
    result, macros, last = Ruleset(), {}, 0
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at]
        at += 1
        while line.endswith("\\") and at < len(lines):
            line = line[:-1] + " " + lines[at]
            at += 1
        words = tokens_of(line, number)
        if len(words) >= 3 and words[1] == "=" and words[0].isidentifier():
            macros[words[0]] = [word for part in words[2:] for word in tokens_of(part.removeprefix('"'), number)]
            continue
        words = [each for word in words for each in (expand(word, macros, number) if word[:1] == "$" else [word])]
        if not words:
            continue
        rank = ORDER.get(words[0])
        if rank is None:
            if words[0] in UNBUILT:
                raise base.unsupported(f"{words[0]} in pf rules")
            raise SyntaxProblem(number)
        if rank < last:
            # parse.y check_rulestate()
            raise SyntaxProblem(
                number,
                "Rules must be in order: options, ethernet, normalization, queueing, translation, filtering",
            )
        last = rank
        parse_statement(result, Words(words, number), main)
    return result


def expand(word: str, macros: dict[str, list[str]], number: int) -> list[str]:
    if word[1:] not in macros:
        raise SyntaxProblem(number, f"macro '{word[1:]}' not defined")
    return macros[word[1:]]


class Words:
    def __init__(self, words: list[str], line: int) -> None:
        self.words, self.line, self.at = words, line, 0

    def peek(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else ""

    def next(self) -> str:
        word = self.peek()
        if not word:
            raise self.problem()
        self.at += 1
        return word

    def take(self, *choices: str) -> str:
        """The next word if it is one of ``choices``, else ""."""
        if self.peek() in choices and self.peek():
            return self.next()
        return ""

    def need(self, word: str) -> None:
        if self.next() != word:
            raise self.problem()

    def problem(self, message: str = "syntax error") -> SyntaxProblem:
        if self.peek() in UNBUILT:
            raise base.unsupported(f"{self.peek()} in pf rules")
        return SyntaxProblem(self.line, message)

    def take_list(self, take_item: object) -> list:  # type: ignore[type-arg]
        """``one`` or ``{ one, one … }`` (commas may be left out)."""
        if not self.take("{"):
            return [take_item(self)]  # type: ignore[operator]
        found = [take_item(self)]  # type: ignore[operator]
        while not self.take("}"):
            self.take(",")
            found.append(take_item(self))  # type: ignore[operator]
        return found


def parse_statement(result: Ruleset, words: Words, main: bool) -> None:
    first = words.next()
    if first == "set":
        option(result, words, main)
    elif first in ("anchor", "nat-anchor", "rdr-anchor"):
        name = words.next()
        if not name.startswith('"') and not name[0].isalpha():
            raise words.problem()
        rule = {"what": first, "anchor": name.removeprefix('"')}
        words.take("all")
        (result.filter if first == "anchor" else result.nat).append(rule)
    elif first in ("pass", "block"):
        result.filter += filter_rule(result, first, words)
    else:
        no = first == "no"
        kind = words.next() if no else first
        if kind not in ("nat", "rdr"):
            raise words.problem()
        result.nat += translation(kind, no, words)
    if words.peek():
        raise words.problem()


def option(result: Ruleset, words: Words, main: bool) -> None:
    if not main:
        raise base.unsupported("set in an anchor")
    name = words.next()
    if name == "skip":
        words.need("on")
        result.skip = words.take_list(lambda each: each.next())
    elif name == "block-policy":
        policy = words.next()
        if policy not in ("drop", "return"):
            raise words.problem()
        result.block_return = policy == "return"
    elif name in UNBUILT:
        raise base.unsupported(f"set {name} in pf rules")
    else:
        raise words.problem()


def filter_rule(result: Ruleset, action: str, words: Words) -> list[Rule]:
    """``action [in|out] [quick] [on if] [af] [proto p] [hosts] [options]``: in this order, as in parse.y."""
    rule: Rule = {"what": action, "drop": ""}
    if action == "block":
        rule["drop"] = words.take("drop", "return") or ("return" if result.block_return else "drop")
    rule["direction"] = words.take("in", "out")
    rule["quick"] = bool(words.take("quick"))
    rules = common(rule, words)
    state, flags = "keep" if action == "pass" else "", ""
    while words.peek():
        word = words.next()
        if word in ("keep", "no") and words.take("state"):
            state = word
        elif word == "flags":
            flags = words.next()
            if flags not in ("S/SA", "any"):
                raise base.unsupported(f"flags {flags} in pf rules")
        elif word == "label":
            words.next()
        else:
            words.at -= 1
            raise words.problem()
    for each in rules:
        each["state"] = "" if action == "block" else state
        each["flags"] = flags or ("S/SA" if each["state"] == "keep" and each["proto"] in ("", "tcp") else "")
    return rules


def translation(kind: str, no: bool, words: Words) -> list[Rule]:
    """``[no] nat|rdr [pass] [on if] [af] [proto p] hosts [-> address [port n]]``."""
    rule: Rule = {"what": kind, "no": no, "pass": bool(words.take("pass"))}
    if rule["pass"] and kind == "nat":
        raise base.unsupported("nat pass in pf rules")
    rules = common(rule, words)
    target, port = "", ""
    if no:
        if words.peek() == "->":
            raise words.problem()
    else:
        words.need("->")
        target = "(" + words.next() + ")" if words.take("(") else words.next()
        if target.startswith("("):
            words.need(")")
        elif not family(target.partition("/")[0]):
            raise words.problem()
        if words.take("port"):
            port = words.next()
            if kind == "nat" or ":" in port:
                raise base.unsupported("this port of a translation")
            number(words, port)
    for each in rules:
        if each["what"] == "rdr" and port and each["proto"] not in ("tcp", "udp"):
            raise words.problem("port only applies to tcp/udp")
        each["to"], each["toport"] = target, port
        if target and not target.startswith("("):
            each["af"] = each["af"] or family(target.partition("/")[0])
    return rules


def common(rule: Rule, words: Words) -> list[Rule]:
    """The common part of filter and translation rules; lists expand to one rule for each member (expand_rule())."""
    interfaces = words.take_list(interface) if words.take("on") else [""]
    af = words.take("inet", "inet6")
    protocols = words.take_list(protocol) if words.take("proto") else [""]
    sources, sports, targets, dports = ["any"], [""], ["any"], [""]
    if not words.take("all"):
        if words.take("from"):
            sources, sports = words.take_list(host), ports(words)
        if words.take("to"):
            targets, dports = words.take_list(host), ports(words)
    found = []
    for on in interfaces:
        for proto in protocols:
            for source in sources:
                for sport in sports:
                    for target in targets:
                        for dport in dports:
                            if (sport or dport) and proto not in ("tcp", "udp"):
                                raise words.problem("port only applies to tcp/udp")
                            fields = {"on": on, "af": af, "proto": proto, "source": source, "sport": sport}
                            fields |= {"target": target, "dport": dport}
                            if fit(fields, words):
                                found.append({**rule, **fields})
    if not found:
        raise words.problem("rule expands to no valid combination")
    return found


def fit(fields: Rule, words: Words) -> bool:
    """The address families must match; the rule adopts them."""
    families = {family(fields[key].removeprefix("! ").partition("/")[0]) for key in ("source", "target")} - {""}
    if fields["af"]:
        families.add(fields["af"])
    if len(families) > 1:
        return False
    fields["af"] = families.pop() if families else ""
    return True


def interface(words: Words) -> str:
    no = "! " if words.take("!") else ""
    name = words.next()
    if name == "any":
        raise base.unsupported("on any in pf rules")
    if not name[0].isalnum() or len(name) > 15:
        raise words.problem()
    return no + name


def protocol(words: Words) -> str:
    name = words.next()
    if name not in ("tcp", "udp", "icmp", "icmp6", "ipv6-icmp"):
        raise base.unsupported(f"proto {name} in pf rules") if name.isalnum() else words.problem()
    return name


def family(text: str) -> str:
    """inet, inet6, or "" if it is not an address."""
    for af, name in ((_socket.AF_INET, "inet"), (_socket.AF_INET6, "inet6")):
        try:
            _socket.inet_pton(af, text)
            return name
        except (OSError, ValueError):
            continue
    return ""


def host(words: Words) -> str:
    no = "! " if words.take("!") else ""
    word = words.next()
    if word == "any":
        if no:
            raise words.problem()
        return "any"
    if word == "(" and words.take("self"):
        words.need(")")  # all addresses that this machine has when the packet arrives
        return no + "(self)"
    if word in ("<", "("):
        raise base.unsupported("tables and interface addresses in pf rules")
    text, slash, length = word.partition("/")
    af = family(text)
    if not af:
        if word in KEYWORDS or not text[0].isalnum():
            raise words.problem()
        raise base.unsupported(f"the host {word} (no address) in pf rules")
    if slash and not (length.isdigit() and int(length) <= (32 if af == "inet" else 128)):
        raise words.problem("illegal netmask")
    return no + (masked(text, af, int(length)) if slash else text)


def masked(text: str, af: str, length: int) -> str:
    """pfctl stores an address with its mask applied, and does not print a mask of full length."""
    kind, size = (_socket.AF_INET, 4) if af == "inet" else (_socket.AF_INET6, 16)
    bits = int.from_bytes(_socket.inet_pton(kind, text), "big") >> (8 * size - length) << (8 * size - length)
    plain: str = _socket.inet_ntop(kind, bits.to_bytes(size, "big"))
    return plain if length == 8 * size else f"{plain}/{length}"


def ports(words: Words) -> list[str]:
    return words.take_list(port_of) if words.take("port") else [""]


def port_of(words: Words) -> str:
    """``= 80`` for 80, ``80:90``."""
    if words.peek() in ("!", "<", ">"):
        raise base.unsupported("port comparisons in pf rules")
    words.take("=")
    word = words.next()
    low, colon, high = word.partition(":")
    if colon:
        return f"{number(words, low)}:{number(words, high)}"
    return f"= {number(words, low)}"


def number(words: Words, text: str) -> int:
    if text.isdigit():
        if int(text) > 65535:
            raise words.problem("illegal port value " + text)
        return int(text)
    try:
        return int(_socket.getservbyname(text))
    except OSError:
        raise words.problem(f"unknown port {text}") from None


# ---- printing -------------------------------------------------------------------------------------------------------


def service(text: str, proto: str, numeric: bool) -> str:
    """print_port(): the service's name unless -P."""
    if numeric or not text.startswith("= "):
        return text
    try:
        return "= " + str(_socket.getservbyport(int(text[2:]), proto))
    except OSError:
        return text


def show(rule: Rule, numeric: bool) -> str:
    if "anchor" in rule:
        return f'{rule["what"]} "{rule["anchor"]}" all'
    words = ["no"] if rule.get("no") else []
    words.append(rule["what"])
    if rule["what"] == "block":
        words.append(rule["drop"])
    if rule.get("pass"):
        words.append("pass")
    words += [rule["direction"]] if rule.get("direction") else []
    words += ["quick"] if rule.get("quick") else []
    words += ["on", rule["on"]] if rule["on"] else []
    words += [rule["af"]] if rule["af"] else []
    words += ["proto", rule["proto"]] if rule["proto"] else []
    plain = rule["source"] == rule["target"] == "any" and not rule["sport"] and not rule["dport"]
    if plain:
        words.append("all")
    else:
        for key, host_, port_ in (("from", rule["source"], rule["sport"]), ("to", rule["target"], rule["dport"])):
            words += [key, host_] + (["port", service(port_, rule["proto"], numeric)] if port_ else [])
    if rule.get("flags") and not (rule["flags"] == "any" and rule.get("state") == "no"):
        words.append(f"flags {rule['flags']}")
    if rule.get("state"):
        words.append(f"{rule['state']} state")
    if rule.get("to"):
        words += ["->", rule["to"]] + (["port", rule["toport"]] if rule["toport"] else [])
        words += ["round-robin"] if rule["to"].startswith("(") else []
    return " ".join(words)
