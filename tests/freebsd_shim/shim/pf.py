"""Parse and print the part of pf.conf(5) that the gateway and its host role use, with the strictness of pfctl(8).

The grammar follows pf.conf(5) "GRAMMAR" and sbin/pfctl/parse.y. The output follows print_rule() in
sbin/pfctl/pfctl_parser.c.
"""

from __future__ import annotations

import _socket

from shim import base

Rule = dict  # what, direction, drop, quick, on, af, proto, source, sport, target, dport, state, flags, to, toport, …
UINT_MAX = 0xFFFFFFFF

# Keywords of pf.conf(5) that the shim does not support. They are not reported as syntax errors.
UNSUPPORTED_KEYWORDS = set(
    "log user group os match scrub altq queue table antispoof load binat binat-anchor route-to reply-to dup-to "
    "tag tagged probability rtable received-on max-mss set-tos allow-opts fragment icmp-type icmp6-type dnpipe dnqueue "
    "return-rst return-icmp return-icmp6 ether include synproxy modulate static-port bitmask random source-hash "
    "sticky-address once divert-to divert-reply timeout limit optimization ruleset-optimization state-policy hostid "
    "require-order fingerprints debug loginterface reassemble no-df tos max max-src-nodes max-src-conn "
    "max-src-conn-rate overload no-sync sloppy if-bound floating pflow tcp.first tcp.opening tcp.established "
    "tcp.closing tcp.finwait tcp.closed udp.first udp.single udp.multiple icmp.first icmp.error other.first "
    "other.single other.multiple src.track".split()
)
KEYWORDS = set(
    "in out quick on inet inet6 proto from to port all any keep no state flags label pass block drop return nat rdr "
    "anchor nat-anchor rdr-anchor set skip".split()
)
SECTION_RANKS = {
    "set": 0,
    "nat": 3,
    "rdr": 3,
    "no": 3,
    "nat-anchor": 3,
    "rdr-anchor": 3,
    "anchor": 4,
    "pass": 4,
    "block": 4,
}


class RuleSyntaxError(Exception):
    """A syntax error in a rules file. See yyerror()."""

    def __init__(self, line: int, message: str = "syntax error") -> None:
        super().__init__(message)
        self.line, self.message = line, message


class Ruleset:
    """The rules of a file, in order, and the options of the main file.

    ``nat`` contains the nat and rdr rules and their anchors, and ``filter`` contains the other rules and anchors.
    """

    def __init__(self) -> None:
        self.nat: list[Rule] = []
        self.filter: list[Rule] = []
        self.skip: list[str] = []
        self.block_return = False


def tokenize(line: str, line_number: int) -> list[str]:
    """Split a line into words, strings (as ``"text``), and the symbols ``{ } ( ) , ! = < > ->``."""
    tokens, index = [], 0
    while index < len(line):
        character = line[index]
        if character in " \t":
            index += 1
        elif character == "#":
            break
        elif character == '"':
            end = line.find('"', index + 1)
            if end < 0:
                raise RuleSyntaxError(line_number)
            tokens.append(line[index:end])
            index = end + 1
        elif line.startswith("->", index):
            tokens.append("->")
            index += 2
        elif character in "{}(),!=<>":
            tokens.append(character)
            index += 1
        else:
            end = index
            while end < len(line) and line[end] not in ' \t"{}(),!=<>#' and not line.startswith("->", end):
                end += 1
            tokens.append(line[index:end])
            index = end
    return tokens


def parse_rules(text: str, *, is_main: bool) -> Ruleset:
    """Parse the text of a rules file. ``is_main``: whether it is the main file. Raises RuleSyntaxError."""
    ruleset, macros, last_rank = Ruleset(), {}, 0
    lines = text.split("\n")
    index = 0
    while index < len(lines):
        line_number, line = index + 1, lines[index]
        index += 1
        while line.endswith("\\") and index < len(lines):
            line = line[:-1] + " " + lines[index]
            index += 1
        words = tokenize(line, line_number)
        if len(words) >= 3 and words[1] == "=" and words[0].isidentifier():
            macros[words[0]] = [word for part in words[2:] for word in tokenize(part.removeprefix('"'), line_number)]
            continue
        words = [
            each for word in words for each in (expand_macro(word, macros, line_number) if word[:1] == "$" else [word])
        ]
        if not words:
            continue
        rank = SECTION_RANKS.get(words[0])
        if rank is None:
            if words[0] in UNSUPPORTED_KEYWORDS:
                raise base.unsupported(f"{words[0]} in pf rules")
            raise RuleSyntaxError(line_number)
        if rank < last_rank:
            # parse.y check_rulestate()
            raise RuleSyntaxError(
                line_number,
                "Rules must be in order: options, ethernet, normalization, queueing, translation, filtering",
            )
        last_rank = rank
        parse_statement(ruleset, TokenStream(words, line_number), is_main)
    return ruleset


def expand_macro(word: str, macros: dict[str, list[str]], line_number: int) -> list[str]:
    if word[1:] not in macros:
        raise RuleSyntaxError(line_number, f"macro '{word[1:]}' not defined")
    return macros[word[1:]]


class TokenStream:
    def __init__(self, words: list[str], line: int) -> None:
        self.words, self.line, self.position = words, line, 0

    def peek(self) -> str:
        return self.words[self.position] if self.position < len(self.words) else ""

    def next(self) -> str:
        word = self.peek()
        if not word:
            raise self.make_syntax_error()
        self.position += 1
        return word

    def take(self, *choices: str) -> str:
        """Consume and return the next word if it is one of ``choices``. Otherwise, return ""."""
        if self.peek() in choices and self.peek():
            return self.next()
        return ""

    def expect(self, word: str) -> None:
        if self.next() != word:
            raise self.make_syntax_error()

    def make_syntax_error(self, message: str = "syntax error") -> RuleSyntaxError:
        if self.peek() in UNSUPPORTED_KEYWORDS:
            raise base.unsupported(f"{self.peek()} in pf rules")
        return RuleSyntaxError(self.line, message)

    def take_list(self, take_item: object) -> list:  # type: ignore[type-arg]
        """Parse one item, or a list of items in braces, separated by optional commas."""
        if not self.take("{"):
            return [take_item(self)]  # type: ignore[operator]
        items = [take_item(self)]  # type: ignore[operator]
        while not self.take("}"):
            self.take(",")
            items.append(take_item(self))  # type: ignore[operator]
        return items


def parse_statement(ruleset: Ruleset, tokens: TokenStream, is_main: bool) -> None:
    keyword = tokens.next()
    if keyword == "set":
        parse_option(ruleset, tokens, is_main)
    elif keyword in ("anchor", "nat-anchor", "rdr-anchor"):
        name = tokens.next()
        if not name.startswith('"') and not name[0].isalpha():
            raise tokens.make_syntax_error()
        rule = {"what": keyword, "anchor": name.removeprefix('"')}
        tokens.take("all")
        (ruleset.filter if keyword == "anchor" else ruleset.nat).append(rule)
    elif keyword in ("pass", "block"):
        ruleset.filter += parse_filter_rule(ruleset, keyword, tokens)
    else:
        is_negated = keyword == "no"
        kind = tokens.next() if is_negated else keyword
        if kind not in ("nat", "rdr"):
            raise tokens.make_syntax_error()
        ruleset.nat += parse_translation(kind, is_negated, tokens)
    if tokens.peek():
        raise tokens.make_syntax_error()


def parse_option(ruleset: Ruleset, tokens: TokenStream, is_main: bool) -> None:
    if not is_main:
        raise base.unsupported("set in an anchor")
    name = tokens.next()
    if name == "skip":
        tokens.expect("on")
        ruleset.skip = tokens.take_list(lambda each: each.next())
    elif name == "block-policy":
        policy = tokens.next()
        if policy not in ("drop", "return"):
            raise tokens.make_syntax_error()
        ruleset.block_return = policy == "return"
    elif name in UNSUPPORTED_KEYWORDS:
        raise base.unsupported(f"set {name} in pf rules")
    else:
        raise tokens.make_syntax_error()


def parse_filter_rule(ruleset: Ruleset, action: str, tokens: TokenStream) -> list[Rule]:
    """Parse ``action [in|out] [quick] [on if] [af] [proto p] [hosts] [options]``, in this order, as parse.y does."""
    rule: Rule = {"what": action, "drop": ""}
    if action == "block":
        rule["drop"] = tokens.take("drop", "return") or ("return" if ruleset.block_return else "drop")
    rule["direction"] = tokens.take("in", "out")
    rule["quick"] = bool(tokens.take("quick"))
    rules = parse_match(rule, tokens)
    state, flags = "keep" if action == "pass" else "", ""
    is_state_set, limit = False, {}
    while tokens.peek():
        word = tokens.next()
        if word in ("keep", "no") and tokens.take("state"):
            if is_state_set:
                raise tokens.make_syntax_error("modulate or keep cannot be redefined")
            state, is_state_set = word, True
            if word == "keep" and tokens.take("("):
                if action == "block":
                    raise base.unsupported("state options of block rules")
                limit = parse_state_options(tokens)
        elif word == "flags":
            flags = tokens.next()
            if flags not in ("S/SA", "any"):
                raise base.unsupported(f"flags {flags} in pf rules")
        elif word == "label":
            tokens.next()
        else:
            tokens.position -= 1
            raise tokens.make_syntax_error()
    for each in rules:
        if limit.get("max_src_states") and not (
            limit["source_track"] == "global" and each["quick"] and each["af"] == "inet"
        ):
            raise base.unsupported("max-src-states without global, quick and inet")
        each |= limit
        each["state"] = "" if action == "block" else state
        each["flags"] = flags or ("S/SA" if each["state"] == "keep" and each["proto"] in ("", "tcp") else "")
    return rules


def parse_state_options(tokens: TokenStream) -> dict[str, object]:
    """Parse ``source-track [rule|global], max-src-states n)``. See state_opt_item and pfrule in parse.y."""
    scope, limit = "", 0
    while True:
        word = tokens.next()
        if word == "source-track":
            if scope:
                raise tokens.make_syntax_error("state option 'source-track' multiple definitions")
            scope = tokens.take("rule", "global") or "default"
        elif word == "max-src-states":
            number = tokens.next()
            if not number.isdigit():
                raise tokens.make_syntax_error()
            if int(number) > UINT_MAX:
                raise tokens.make_syntax_error("only positive values permitted")
            if limit:
                raise tokens.make_syntax_error("state option 'max-src-states' multiple definitions")
            limit = int(number)
            if not limit:
                raise tokens.make_syntax_error("'max-src-states' must be > 0")
        else:
            tokens.position -= 1
            raise tokens.make_syntax_error()
        if tokens.take(")"):
            break
        tokens.take(",")
    # Without "rule", PFRULE_RULESRCTRACK is not set, so the states are counted globally.
    return {"source_track": "rule" if scope == "rule" else "global", "max_src_states": limit}


def parse_translation(kind: str, is_negated: bool, tokens: TokenStream) -> list[Rule]:
    """Parse ``[no] nat|rdr [pass] [on if] [af] [proto p] hosts [-> address [port n]]``."""
    rule: Rule = {"what": kind, "no": is_negated, "pass": bool(tokens.take("pass"))}
    if rule["pass"] and kind == "nat":
        raise base.unsupported("nat pass in pf rules")
    rules = parse_match(rule, tokens)
    target, port = "", ""
    if is_negated:
        if tokens.peek() == "->":
            raise tokens.make_syntax_error()
    else:
        tokens.expect("->")
        target = "(" + tokens.next() + ")" if tokens.take("(") else tokens.next()
        if target.startswith("("):
            tokens.expect(")")
        elif not find_family(target.partition("/")[0]):
            raise tokens.make_syntax_error()
        if tokens.take("port"):
            port = tokens.next()
            if kind == "nat" or ":" in port:
                raise base.unsupported("this port of a translation")
            parse_port_number(tokens, port)
    for each in rules:
        if each["what"] == "rdr" and port and each["proto"] not in ("tcp", "udp"):
            raise tokens.make_syntax_error("port only applies to tcp/udp")
        each["to"], each["toport"] = target, port
        if target and not target.startswith("("):
            each["af"] = each["af"] or find_family(target.partition("/")[0])
    return rules


def parse_match(rule: Rule, tokens: TokenStream) -> list[Rule]:
    """Parse the common part of filter and translation rules. Lists expand to one rule per item (expand_rule())."""
    interfaces = tokens.take_list(parse_interface) if tokens.take("on") else [""]
    af = tokens.take("inet", "inet6")
    protocols = tokens.take_list(parse_protocol) if tokens.take("proto") else [""]
    sources, sports, targets, dports = ["any"], [""], ["any"], [""]
    if not tokens.take("all"):
        if tokens.take("from"):
            sources, sports = tokens.take_list(parse_host), parse_ports(tokens)
        if tokens.take("to"):
            targets, dports = tokens.take_list(parse_host), parse_ports(tokens)
    rules = []
    for interface in interfaces:
        for proto in protocols:
            for source in sources:
                for sport in sports:
                    for target in targets:
                        for dport in dports:
                            if (sport or dport) and proto not in ("tcp", "udp"):
                                raise tokens.make_syntax_error("port only applies to tcp/udp")
                            fields = {"on": interface, "af": af, "proto": proto, "source": source, "sport": sport}
                            fields |= {"target": target, "dport": dport}
                            if set_address_family(fields, tokens):
                                rules.append({**rule, **fields})
    if not rules:
        raise tokens.make_syntax_error("rule expands to no valid combination")
    return rules


def set_address_family(fields: Rule, tokens: TokenStream) -> bool:
    """Set the rule's address family to the family of its addresses. Returns False if the families conflict."""
    families = {find_family(fields[key].removeprefix("! ").partition("/")[0]) for key in ("source", "target")} - {""}
    if fields["af"]:
        families.add(fields["af"])
    if len(families) > 1:
        return False
    fields["af"] = families.pop() if families else ""
    return True


def parse_interface(tokens: TokenStream) -> str:
    negation = "! " if tokens.take("!") else ""
    name = tokens.next()
    if name == "any":
        raise base.unsupported("on any in pf rules")
    if not name[0].isalnum() or len(name) > 15:
        raise tokens.make_syntax_error()
    return negation + name


def parse_protocol(tokens: TokenStream) -> str:
    name = tokens.next()
    if name not in ("tcp", "udp", "icmp", "icmp6", "ipv6-icmp"):
        raise base.unsupported(f"proto {name} in pf rules") if name.isalnum() else tokens.make_syntax_error()
    return name


def find_family(text: str) -> str:
    """Return the family of an address, ``inet`` or ``inet6``, or "" if the text is not an address."""
    for af, name in ((_socket.AF_INET, "inet"), (_socket.AF_INET6, "inet6")):
        try:
            _socket.inet_pton(af, text)
            return name
        except (OSError, ValueError):
            continue
    return ""


def parse_host(tokens: TokenStream) -> str:
    negation = "! " if tokens.take("!") else ""
    word = tokens.next()
    if word == "any":
        if negation:
            raise tokens.make_syntax_error()
        return "any"
    if word == "(" and tokens.take("self"):
        tokens.expect(")")  # All addresses that this machine has when a packet arrives.
        return negation + "(self)"
    if word in ("<", "("):
        raise base.unsupported("tables and interface addresses in pf rules")
    text, slash, length = word.partition("/")
    af = find_family(text)
    if not af:
        if word in KEYWORDS or not text[0].isalnum():
            raise tokens.make_syntax_error()
        raise base.unsupported(f"the host {word} (no address) in pf rules")
    if slash and not (length.isdigit() and int(length) <= (32 if af == "inet" else 128)):
        raise tokens.make_syntax_error("illegal netmask")
    return negation + (apply_mask(text, af, int(length)) if slash else text)


def apply_mask(text: str, af: str, length: int) -> str:
    """Apply the mask to an address, as pfctl does. A mask of full length is omitted."""
    kind, size = (_socket.AF_INET, 4) if af == "inet" else (_socket.AF_INET6, 16)
    bits = int.from_bytes(_socket.inet_pton(kind, text), "big") >> (8 * size - length) << (8 * size - length)
    address: str = _socket.inet_ntop(kind, bits.to_bytes(size, "big"))
    return address if length == 8 * size else f"{address}/{length}"


def parse_ports(tokens: TokenStream) -> list[str]:
    return tokens.take_list(parse_port) if tokens.take("port") else [""]


def parse_port(tokens: TokenStream) -> str:
    """Parse a port or a range of ports. Returns ``= 80`` for 80, and ``80:90`` for a range."""
    if tokens.peek() in ("!", "<", ">"):
        raise base.unsupported("port comparisons in pf rules")
    tokens.take("=")
    word = tokens.next()
    low, colon, high = word.partition(":")
    if colon:
        return f"{parse_port_number(tokens, low)}:{parse_port_number(tokens, high)}"
    return f"= {parse_port_number(tokens, low)}"


def parse_port_number(tokens: TokenStream, text: str) -> int:
    if text.isdigit():
        if int(text) > 65535:
            raise tokens.make_syntax_error("illegal port value " + text)
        return int(text)
    try:
        return int(_socket.getservbyname(text))
    except OSError:
        raise tokens.make_syntax_error(f"unknown port {text}") from None


# ---- printing -------------------------------------------------------------------------------------------------------


def format_port(text: str, proto: str, numeric: bool) -> str:
    """Return the name of a port's service, unless ``numeric`` (-P) is set. See print_port()."""
    if numeric or not text.startswith("= "):
        return text
    try:
        return "= " + str(_socket.getservbyport(int(text[2:]), proto))
    except OSError:
        return text


def format_rule(rule: Rule, numeric: bool) -> str:
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
    matches_all = rule["source"] == rule["target"] == "any" and not rule["sport"] and not rule["dport"]
    if matches_all:
        words.append("all")
    else:
        for key, host, port in (("from", rule["source"], rule["sport"]), ("to", rule["target"], rule["dport"])):
            words += [key, host] + (["port", format_port(port, rule["proto"], numeric)] if port else [])
    if rule.get("flags") and not (rule["flags"] == "any" and rule.get("state") == "no"):
        words.append(f"flags {rule['flags']}")
    if rule.get("state"):
        words.append(f"{rule['state']} state")
    if rule.get("source_track"):
        options = [f"source-track {rule['source_track']}"]
        options += [f"max-src-states {rule['max_src_states']}"] if rule["max_src_states"] else []
        words.append(f"({', '.join(options)})")
    if rule.get("to"):
        words += ["->", rule["to"]] + (["port", rule["toport"]] if rule["toport"] else [])
        words += ["round-robin"] if rule["to"].startswith("(") else []
    return " ".join(words)
