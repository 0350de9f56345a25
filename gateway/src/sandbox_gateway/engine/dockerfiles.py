"""Translate Dockerfiles to the steps of recipes. Nothing is read from the context, and nothing is executed.

A value that contains variables of the image is known only inside the machine. Inside this module, NUL characters
enclose the names of such variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from sandbox_gateway.engine.build_context_patterns import translate_source
from sandbox_gateway.engine.image_steps import ImageSteps
from sandbox_gateway.errors import GatewayError, Invalid, Unsupported
from sandbox_gateway.image_references import parse_image_reference

if TYPE_CHECKING:
    from e2b_dockerfile_utils import DockerfileInstruction

MAX_LENGTH = 256 << 10
_MAX_COMMENT_LENGTH = 1000
"""The maximum length of comments before the first instruction, in which the parser looks for directives."""
_MAX_STEPS = 1000
_MAX_ARGS = 200
_MAX_VARIABLES_LENGTH = 64 << 10
_MAX_EXPANDED_LENGTH = 256 << 10
_SHELL = ("/bin/sh", "-c")
_MARK = "\0"
_HARMLESS_INSTRUCTIONS = ("EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
"""Instructions without an effect: every port of a sandbox is reachable, and a template has no labels or signals."""
_REMEDIES = {
    "ADD": "use COPY for files of the context, and RUN to download or to unpack",
    "HEALTHCHECK": "remove it, and set ready_probe to a command that succeeds when the template is ready",
    "ONBUILD": "remove it, and write the instruction in the Dockerfiles of the derived templates",
    "SHELL": 'remove it, and use the form RUN ["SHELL", "-c", "COMMAND"]',
    "VOLUME": "remove it, and attach volumes to the sandboxes",
}
_PLATFORM_ARGS = re.compile(r"(BUILD|TARGET)(PLATFORM|OS|ARCH|VARIANT)")
_PATTERN_SUBSTITUTION = re.compile(r"\$\{\w+[#%/]")
_CONDITIONAL_SUBSTITUTION = re.compile(r"\$\{(\w+):?[-+?]")
_CHMOD = re.compile(r"[0-7]{1,4}")


@dataclass(frozen=True)
class _Step:
    """A step of a Dockerfile. ``env``: the ARGs that a RUN step sees. ``source``: the source of a COPY step."""

    line: int
    kind: str
    args: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Dockerfile:
    """A translated Dockerfile. ``sources``: the sources of its COPY instructions, with the lines where they occur."""

    image: str
    sources: Mapping[str, int]
    _steps: Sequence[_Step]
    _start: Mapping[str, Any]
    """See ``ImageSteps.build_start_command``."""
    _last_line: int

    def compile(self, digests: Mapping[str, str], max_bytes: int) -> tuple[list[str], str]:
        """Return the set-up commands and the start command; "" stands for the image's own start command.

        ``digests``: the digest of the archive for each of ``sources``. ``max_bytes``: the maximum size of all set-up
        commands. Raises Invalid.
        """
        steps = ImageSteps(max_bytes, expands_variables=True)
        for step in self._steps:
            try:
                if step.kind == "RUN":
                    steps.add_run(step.args, step.env)
                elif step.kind == "COPY":
                    if step.source not in digests:
                        raise Invalid(f"send the digest of the source {_shorten(step.source)!r} in `digests`")
                    steps.add("COPY", step.args, digests[step.source])
                else:
                    steps.add(step.kind, step.args)
            except GatewayError as error:
                _fail(step.line, error.message)
        try:
            return steps.commands, steps.build_start_command(self._start)
        except GatewayError as error:
            _fail(self._last_line, error.message)


def _fail(line: int, message: str, error_class: type[GatewayError] = Invalid) -> NoReturn:
    raise error_class(f"line {line} of the Dockerfile: {message}")


def parse_dockerfile(text: str) -> Dockerfile:
    """Parse a Dockerfile. Raises Invalid, or Unsupported, with a sentence that names the line."""
    from e2b_dockerfile_utils import DockerfileSyntaxError, parse_dockerfile_ast

    if len(text) > MAX_LENGTH:
        raise Invalid(f"the Dockerfile is {len(text)} characters long: use at most {MAX_LENGTH}")
    lines = text.removeprefix("\ufeff").split("\n")
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            _fail(number, "it contains a NUL character: remove it, or save the file as UTF-8")
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("#"):
            break
        if len(line) > _MAX_COMMENT_LENGTH:
            _fail(number, f"this comment has more than {_MAX_COMMENT_LENGTH} characters: shorten it")
    try:
        tree = parse_dockerfile_ast(text)
    except DockerfileSyntaxError as error:
        message = re.sub(r"^Dockerfile parse error( on line \d+)?: ", "", str(error))
        _fail(error.line or 1, f"{_shorten(message)}: correct it")
    except RecursionError:
        raise Invalid("the Dockerfile has an instruction that is nested too deeply: simplify it") from None
    translator = _Translator(tree.escape_token)
    for instruction in tree.instructions:
        translator.add(instruction)
    if tree.instructions:
        _check_last_line(tree.instructions[-1], lines, tree.escape_token)
    return translator.finish(len(lines))


def _check_last_line(instruction: DockerfileInstruction, lines: Sequence[str], escape_token: str) -> None:
    """Raise Invalid if the last instruction ends with a continuation. Docker ignores it, but part may be missing."""
    if instruction.heredocs:
        return
    numbers = [
        number
        for number in range(instruction.start_line, instruction.end_line + 1)
        if lines[number - 1].strip() and not lines[number - 1].lstrip().startswith("#")
    ]
    text = lines[numbers[-1] - 1].rstrip()
    if text.endswith(escape_token) and not text.endswith(escape_token * 2):
        remedy = f"complete the instruction, or remove the {escape_token}"
        _fail(numbers[-1], f"the file ends after a continuation: {remedy}")


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


class _Variables(Mapping[str, str]):
    """The variables that a Dockerfile can refer to. Others may be variables of the image."""

    def __init__(self, *, has_image: bool) -> None:
        self.env: dict[str, str] = {}
        self.args: dict[str, str | None] = {}
        """The ARGs by name. None: without a value."""
        self.max_length = 0
        """The length of the longest value so far."""
        self._has_image = has_image
        self._length = 0

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.env:
            return self.env[name]
        if name in self.args:
            return self.args[name]
        return f"{_MARK}{name}{_MARK}" if self._has_image else None

    def __getitem__(self, name: str) -> str:
        return str(self.get(name))

    def __iter__(self) -> Any:
        return iter({**self.args, **self.env})

    def __len__(self) -> int:
        return len({**self.args, **self.env})

    def is_known(self, name: str) -> bool:
        """Return whether a condition on the variable can be decided without the image."""
        return _MARK not in (self.get(name) or "")

    def set(self, variables: dict[str, Any], name: str, value: str | None, line: int) -> None:
        self._length += len(name) + len(value or "")
        if name in variables:
            self._length -= len(name) + len(variables[name] or "")
        if self._length > _MAX_VARIABLES_LENGTH:
            limit = f"{_MAX_VARIABLES_LENGTH >> 10} KiB"
            _fail(line, f"the variables take up more than {limit} in total: put long values into files")
        self.max_length = max(self.max_length, len(value or ""))
        variables[name] = value


class _Translator:
    def __init__(self, escape_token: str) -> None:
        self._escape_token = escape_token
        self._variables = _Variables(has_image=False)
        """Before FROM, the ARGs for it. After it, the variables of the stage."""
        self._global_args: dict[str, str | None] = {}
        self._image = ""
        self._steps: list[_Step] = []
        self._sources: dict[str, int] = {}
        self._entry_point: Sequence[str] | None = None
        self._cmd: Sequence[str] | None = None
        self._ignores_cmd = False

    def add(self, instruction: DockerfileInstruction) -> None:
        name, line = instruction.name, instruction.start_line
        if name in _REMEDIES:
            _fail(line, f"{name} is not supported: {_REMEDIES[name]}", Unsupported)
        if not self._image and name not in ("FROM", "ARG"):
            _fail(line, f"{name} comes before FROM: begin with FROM and an image")
        if name in _HARMLESS_INSTRUCTIONS:
            return
        getattr(self, f"_add_{name.lower()}")(instruction)
        if len(self._steps) > _MAX_STEPS:
            _fail(line, f"there are more than {_MAX_STEPS} steps: combine some of them")

    def finish(self, last_line: int) -> Dockerfile:
        if not self._image:
            raise Invalid("the Dockerfile has no FROM: begin with FROM and an image")
        start: dict[str, Any] = {}
        if self._entry_point is not None:
            start["args"] = [*self._entry_point, *(() if self._ignores_cmd else self._cmd or ())]
        elif self._cmd is not None:
            start["cmd"] = [*self._cmd]
        return Dockerfile(self._image, self._sources, self._steps, start, last_line)

    def _add_from(self, instruction: DockerfileInstruction) -> None:
        line, args = instruction.start_line, instruction.args
        if self._image:
            remedy = "build the other stages as images, and copy their files into the context"
            _fail(line, f"a second FROM begins another stage, and only one is supported: {remedy}", Unsupported)
        self._parse_flags(instruction, {})
        if not (len(args) == 1 or (len(args) == 3 and args[1].lower() == "as")):
            _fail(line, "FROM needs one image, and optionally AS and a name: correct it")
        image = self._expand(instruction, args[0])
        if image == "scratch":
            _fail(line, "scratch is an empty image, but a template needs a shell: use another image", Unsupported)
        try:
            parse_image_reference(image)
        except ValueError as error:
            _fail(line, str(error))
        self._image = image
        self._global_args = self._variables.args
        self._variables = _Variables(has_image=True)

    def _add_arg(self, instruction: DockerfileInstruction) -> None:
        line = instruction.start_line
        self._parse_flags(instruction, {})
        if not instruction.args:
            _fail(line, "ARG needs a name: use ARG NAME=VALUE")
        for word in instruction.args:
            name, sign, text = word.partition("=")
            if not name:
                _fail(line, "ARG needs a name: use ARG NAME=VALUE")
            value = self._expand(instruction, text) if sign else self._global_args.get(name)
            if value is None and _PLATFORM_ARGS.fullmatch(name):
                _fail(line, f"the gateway sets no ARG {name}: give it a default, such as ARG {name}=VALUE", Unsupported)
            if name not in self._variables.args and len(self._variables.args) >= _MAX_ARGS:
                _fail(line, f"there are more than {_MAX_ARGS} ARGs: use fewer")
            self._variables.set(self._variables.args, name, value, line)

    def _add_env(self, instruction: DockerfileInstruction) -> None:
        line, args = instruction.start_line, instruction.args
        self._parse_flags(instruction, {})
        if not args:
            _fail(line, "ENV needs a name and a value: use ENV NAME=VALUE")
        pairs = [
            (self._expand(instruction, name), self._expand(instruction, value))
            for name, value in zip(args[::3], args[1::3], strict=True)
        ]
        for name, value in pairs:
            if not name or _MARK in name:
                _fail(line, "the name of a variable is empty or depends on the image: use ENV NAME=VALUE")
            self._variables.set(self._variables.env, name, value, line)
        self._steps.append(
            _Step(line, "ENV", [text for name, value in pairs for text in (name, _make_template(value))])
        )

    def _add_run(self, instruction: DockerfileInstruction) -> None:
        line = instruction.start_line
        self._parse_flags(instruction, {})
        args = self._read_command(instruction)
        if not args:
            _fail(line, "RUN needs a command: add it, or remove the instruction")
        env = {
            name: _make_template(value)
            for name, value in self._variables.args.items()
            if value is not None and name not in self._variables.env
        }
        self._steps.append(_Step(line, "RUN", args, env))

    def _read_command(self, instruction: DockerfileInstruction) -> Sequence[str]:
        """Return the arguments of RUN, CMD or ENTRYPOINT; none if the instruction has none."""
        if instruction.json or not instruction.args:
            return instruction.args
        text = instruction.args[0]
        if instruction.heredocs:
            text = self._read_script(instruction, text)
        return [*_SHELL, text] if text.strip() else []

    def _read_script(self, instruction: DockerfileInstruction, text: str) -> str:
        from e2b_dockerfile_utils import chomp_heredoc_content, parse_heredoc

        first = instruction.heredocs[0]
        if len(instruction.heredocs) > 1 or parse_heredoc(text.strip()) is None:
            # The shell reads the documents itself.
            documents = (f"{each.content}{each.name}\n" for each in instruction.heredocs)
            return f"{text}\n{''.join(documents)}"
        script = chomp_heredoc_content(first.content) if first.chomp else first.content
        if script.startswith("#!"):
            message = "a here-document that names its interpreter is not supported: put it into a file of the context"
            _fail(instruction.start_line, message, Unsupported)
        return script

    def _add_copy(self, instruction: DockerfileInstruction) -> None:
        line = instruction.start_line
        remedy = "copy the files into the context"
        flags = self._parse_flags(
            instruction,
            {
                "chown": "",
                "chmod": "",
                "link": "",
                "from": f"files of other stages and images cannot be copied: {remedy}",
            },
        )
        if instruction.heredocs:
            _fail(
                line, "COPY of a here-document is not supported: put the text into a file of the context", Unsupported
            )
        if len(instruction.args) < 2:
            _fail(line, "COPY needs a source and a destination: correct it")
        if len(instruction.args) > _MAX_STEPS:
            _fail(line, f"COPY has more than {_MAX_STEPS} arguments: copy a directory")
        *sources, destination = (self._expand(instruction, word) for word in instruction.args)
        if not destination:
            _fail(line, "the destination of COPY is empty: correct it")
        if len(sources) > 1 and not destination.endswith("/"):
            _fail(line, "COPY of several sources needs a directory as its destination: add a / to its end")
        owner = self._expand(instruction, flags.get("chown", ""))
        mode = self._expand(instruction, flags.get("chmod", ""))
        if mode and not _CHMOD.fullmatch(mode):
            _fail(line, f"the mode {_shorten(mode)!r} is not valid: use an octal mode such as 0755")
        for text in (destination, owner):
            if "$" in text:
                _fail(line, "the destination or the owner contains a dollar sign: use another path")
        for source in sources:
            if _MARK in source:
                _fail(line, "the source contains a variable that only the image may set: declare it with ARG or ENV")
            try:
                translate_source(source)
            except ValueError as error:
                _fail(line, str(error))
            self._sources.setdefault(source, line)
            args = [source, _make_template(destination), _make_template(owner), mode]
            self._steps.append(_Step(line, "COPY", args, source=source))

    def _add_workdir(self, instruction: DockerfileInstruction) -> None:
        self._steps.append(_Step(instruction.start_line, "WORKDIR", [self._read_single(instruction)]))

    def _add_user(self, instruction: DockerfileInstruction) -> None:
        self._steps.append(_Step(instruction.start_line, "USER", [self._read_single(instruction)]))

    def _read_single(self, instruction: DockerfileInstruction) -> str:
        self._parse_flags(instruction, {})
        value = self._expand(instruction, instruction.args[0]) if instruction.args else ""
        if not value:
            _fail(instruction.start_line, f"the argument of {instruction.name} is missing or empty: correct it")
        return _make_template(value)

    def _add_cmd(self, instruction: DockerfileInstruction) -> None:
        self._parse_flags(instruction, {})
        self._cmd = self._read_command(instruction)

    def _add_entrypoint(self, instruction: DockerfileInstruction) -> None:
        self._parse_flags(instruction, {})
        self._entry_point = self._read_command(instruction)
        self._ignores_cmd = bool(self._entry_point) and not instruction.json

    def _parse_flags(self, instruction: DockerfileInstruction, known_flags: Mapping[str, str]) -> dict[str, str]:
        """Return the values of the flags. ``known_flags``: why each known flag is refused; "" if it is supported."""
        values = {}
        for flag in instruction.flags:
            name, _, value = flag.removeprefix("--").partition("=")
            reason = known_flags.get(name, "it is not supported: remove it")
            if reason:
                _fail(
                    instruction.start_line,
                    f"{instruction.name} has the flag --{_shorten(name)}, but {reason}",
                    Unsupported,
                )
            values[name] = value
        return values

    def _expand(self, instruction: DockerfileInstruction, word: str) -> str:
        """Return a word without quotes, and with the values of variables. Raises Invalid."""
        from e2b_dockerfile_utils import ShellLex

        line = instruction.start_line
        if match := _PATTERN_SUBSTITUTION.search(word):
            remedy = "use plain variables, or compute the value in RUN"
            _fail(line, f"{match[0]}…}}: patterns in variables are not supported: {remedy}", Unsupported)
        for match in _CONDITIONAL_SUBSTITUTION.finditer(word):
            if not self._variables.is_known(match[1]):
                remedy = "declare it with ARG or ENV before, or use it without a condition"
                _fail(line, f"{match[0]}…}} depends on a variable that only the image may set: {remedy}", Unsupported)
        if len(word) + word.count("$") * self._variables.max_length > _MAX_EXPANDED_LENGTH:
            _fail(line, "the value could become too long when its variables are replaced: use fewer or shorter ones")
        try:
            return ShellLex(self._escape_token, env=self._variables, skip_unset_env=False).process_word(word)
        except ValueError as error:
            message = str(error).removeprefix(f"failed to process {word!r}: ")
            _fail(line, f"{_shorten(word)!r} is not valid ({_shorten(message)}): correct it")


def _make_template(value: str) -> str:
    """Return a value in which ``${NAME}`` stands for a variable of the image, and ``$$`` for a dollar sign."""
    parts = value.split(_MARK)
    return "".join(f"${{{part}}}" if index % 2 else part.replace("$", "$$") for index, part in enumerate(parts))
