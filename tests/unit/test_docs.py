"""Check the links, commands, plays, configurations and routes in the documentation."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from sandbox_gateway import errors
from sandbox_gateway.api.fleet.route_targets import ROUTES
from sandbox_gateway.api.native.requests import CreateTemplate
from sandbox_gateway.cli import app, formats
from sandbox_gateway.config import Config
from sandbox_gateway.records import OnTimeout
from sandbox_gateway.server import daemon, serving
from tests.support.session import REPOSITORY

DOCS_DIRECTORY = REPOSITORY / "docs"
PAGES = [path for path in (REPOSITORY / "README.md", *sorted(DOCS_DIRECTORY.glob("*.md"))) if path.exists()]
COLLECTION_PREFIX = "grove.sandbox."
_FENCE_PATTERN = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK_PATTERN = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_TASK_LIST_KEYWORDS = ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers")


@dataclass(frozen=True)
class Block:
    """A fenced code block, with its location and language."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@cache
def find_blocks() -> list[Block]:
    blocks = []
    for page in PAGES:
        text = page.read_text()
        for match in _FENCE_PATTERN.finditer(text):
            blocks.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return blocks


def find_blocks_in_languages(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in find_blocks() if block.language in languages]


# --- pages -----------------------------------------------------------------------------------------------------------


def test_the_configuration_page_is_generated_from_the_code() -> None:
    expected_text = daemon.render_configuration_page()
    assert (DOCS_DIRECTORY / "configuration.md").read_text() == expected_text, "run ./dev docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    prose = _FENCE_PATTERN.sub("", page.read_text())
    for link in _LINK_PATTERN.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: the target of {link} does not exist"
        assert target.is_relative_to(REPOSITORY), f"{page.name}: the target of {link} is outside the repository"
        if anchor:
            assert anchor in find_anchors(target), f"{page.name}: {target.name} has no heading for {link}"


def find_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _FENCE_PATTERN.sub("", page.read_text()), re.MULTILINE)
    plain_headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain_headings}


def test_the_code_quotes_existing_headings() -> None:
    """The code refers to a section like this: docs/design.md ("On-disk layout", "Memory roots")."""
    references = []
    for path in (each for name in ("gateway", "plugins", "roles") for each in (REPOSITORY / name).rglob("*.py")):
        text = " ".join(path.read_text().replace("\n#", "\n").split())
        for page, headings in re.findall(r"docs/(\w+\.md) \(((?:\"[^\"]+\"(?:, )?)+)\)", text):
            references += [(page, heading) for heading in re.findall(r'"([^"]+)"', headings)]
    assert len(references) >= 5
    for page, heading in references:
        assert re.search(rf"^##+ {re.escape(heading)}$", (DOCS_DIRECTORY / page).read_text(), re.MULTILINE), (
            f"{page} has no section {heading!r}"
        )


def test_every_page_is_in_the_index() -> None:
    links = set(_LINK_PATTERN.findall((DOCS_DIRECTORY / "README.md").read_text()))
    assert {page.name for page in DOCS_DIRECTORY.glob("*.md")} - {"README.md"} <= links


@pytest.mark.parametrize("page", sorted(DOCS_DIRECTORY.glob("*.md")), ids=lambda page: page.name)
def test_fences_are_closed_and_have_a_language(page: Path) -> None:
    """The other tests would skip a fence without a language."""
    text = page.read_text()
    assert text.count("\n```") == 2 * len(_FENCE_PATTERN.findall(text)), f"{page.name}: a fence is not closed"
    assert all(language for language, _ in _FENCE_PATTERN.findall(text)), f"{page.name}: a fence has no language"


# --- plays -----------------------------------------------------------------------------------------------------------


@cache
def load_module_options() -> dict[str, dict[str, Any]]:
    """Return each module's options, including those from its documentation fragments, by the module's full name."""
    return {
        f"{COLLECTION_PREFIX}{path.stem}": _load_options(path)
        for path in (REPOSITORY / "plugins" / "modules").glob("*.py")
    }


def _load_options(module: Path) -> dict[str, Any]:
    document = _load_documentation(module)
    options = dict(document["options"])
    for fragment in document.get("extends_documentation_fragment", []):
        name = fragment.removeprefix(COLLECTION_PREFIX)
        options |= _load_documentation(REPOSITORY / "plugins" / "doc_fragments" / f"{name}.py").get("options") or {}
    return options


def _load_documentation(path: Path) -> dict[str, Any]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "DOCUMENTATION":
            document = yaml.safe_load(ast.literal_eval(node.value))
            assert isinstance(document, dict)
            return document
    raise AssertionError(f"{path.name} has no DOCUMENTATION")


@cache
def load_role_options() -> dict[str, dict[str, Any]]:
    """Return each role's options by the role's full name."""
    options = {}
    for path in (REPOSITORY / "roles").glob("*/meta/argument_specs.yml"):
        specification = yaml.safe_load(path.read_text())["argument_specs"]["main"]
        options[COLLECTION_PREFIX + path.parent.parent.name] = specification.get("options") or {}
    return options


def list_option_names(options: Mapping[str, Any]) -> set[str]:
    """Return the names of options, including their aliases."""
    return {name for key, option in options.items() for name in (key, *(option.get("aliases") or []))}


def check_arguments(location: str, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Check that every argument, including suboptions, is one of ``options`` and has a valid value."""
    unknown_options = arguments.keys() - list_option_names(options)
    assert not unknown_options, f"{location} has no option {', '.join(sorted(unknown_options))}"
    for name, value in arguments.items():
        option = next(each for key, each in options.items() if name in (key, *(each.get("aliases") or [])))
        suboptions = option.get("suboptions") or (
            option.get("options") if option.get("type") in ("dict", "list") else None
        )
        for item in value if isinstance(value, list) else [value]:
            if suboptions and isinstance(item, dict):
                check_arguments(f"{location}.{name}", suboptions, item)
            elif option.get("choices") and "{{" not in str(item):
                assert item in option["choices"], f"{location}: {name} must be one of {option['choices']}, not {item!r}"


def check_role(location: str, name: str, variables: Mapping[str, Any]) -> None:
    if not name.startswith(COLLECTION_PREFIX):
        return
    assert name in load_role_options(), f"{location}: there is no role {name}"
    check_arguments(f"{location}: role {name}", load_role_options()[name], variables)
    if "gateway_config" in variables:
        Config.model_validate(_remove_templates(variables["gateway_config"]))


def _remove_templates(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without values that contain templates, which only a play can evaluate."""
    converted_values = {
        key: _remove_templates(value) if isinstance(value, dict) else value for key, value in config.items()
    }
    return {key: value for key, value in converted_values.items() if "{{" not in str(value) or isinstance(value, dict)}


def check_task(location: str, task: Mapping[str, Any]) -> None:
    for key, value in task.items():
        if key in _TASK_LIST_KEYWORDS:
            for inner_task in value:
                check_task(location, inner_task)
        elif key.startswith(COLLECTION_PREFIX):
            assert key in load_module_options(), f"{location}: there is no module {key}"
            check_arguments(f"{location}: {key}", load_module_options()[key], value)
            required_options = {name for name, option in load_module_options()[key].items() if option.get("required")}
            missing_options = [
                name
                for name in required_options
                if not {name, *(load_module_options()[key][name].get("aliases") or [])} & value.keys()
            ]
            assert not missing_options, f"{location}: {key} needs {', '.join(missing_options)}"
        elif key in ("ansible.builtin.include_role", "ansible.builtin.import_role"):
            check_role(location, value["name"], task.get("vars") or {})


def check_play(location: str, play: Mapping[str, Any]) -> None:
    check_task(location, play)
    for entry in play.get("roles") or []:
        role: dict[str, Any] = {"role": entry} if isinstance(entry, str) else entry
        check_role(location, role["role"], role.get("vars") or {})
    common_options = set.intersection(*(list_option_names(options) for options in load_module_options().values()))
    for group, defaults in (play.get("module_defaults") or {}).items():
        if group.startswith(f"group/{COLLECTION_PREFIX}"):
            groups = yaml.safe_load((REPOSITORY / "meta" / "runtime.yml").read_text())["action_groups"]
            assert group.removeprefix(f"group/{COLLECTION_PREFIX}") in groups, f"{location}: there is no {group}"
            assert defaults.keys() <= common_options, (
                f"{location}: {group} has no option {defaults.keys() - common_options}"
            )


@pytest.mark.parametrize("block", find_blocks_in_languages("yaml", "yml"))
def test_plays_use_existing_modules_and_options(block: Block) -> None:
    data = yaml.safe_load(block.text)
    assert isinstance(data, list), f"{block}: this is neither a list of plays nor a list of tasks"
    for item in data:
        assert "name" in item, f"{block}: a play or task has no name"
        check_play(str(block), item)


def test_an_invalid_play_is_detected() -> None:
    invalid_plays: list[dict[str, Any]] = [
        {"grove.sandbox.sandbox": {"name": "a", "colour": "red"}},
        {"grove.sandbox.sandbox": {"name": "a", "state": "asleep"}},
        {"grove.sandbox.sandbox": {"state": "absent"}},
        {"grove.sandbox.sandbox": {"name": "a", "network": {"allow_moon": True}}},
        {"grove.sandbox.sandbox_cloud": {"name": "a"}},
        {"block": [{"grove.sandbox.sandbox_fork": {"number": 3}}]},
        {"ansible.builtin.include_role": {"name": "grove.sandbox.nothing"}},
        {"ansible.builtin.include_role": {"name": "grove.sandbox.gateway"}, "vars": {"gateway_colour": "red"}},
        {"roles": [{"role": "grove.sandbox.gateway", "vars": {"gateway_config": {"server": {"sockt": "x"}}}}]},
        {"module_defaults": {"group/grove.sandbox.all": {"snapshot": "x"}}},
    ]
    for item in invalid_plays:
        with pytest.raises((AssertionError, ValueError)):
            check_play("here", item)


# --- names of variables and playbooks ---------------------------------------------------------------------------------

_VARIABLE_PATTERN = re.compile(
    r"(?<![\w.\-/])(gateway|fleet|kvm_xfs_host|jail_zfs_host|install|build|nightly|backup|restore|rollback)_[a-z0-9_]*[a-z0-9]\b(?!\.)"
)
"""Matches a variable of a role or of a playbook of the collection, but not a part of a longer name."""
_NON_VARIABLES = {"gateway_default", "gateway_systemd", "fleet_platforms", "fleet_scale"}
"""Names that match but are not variables of roles: a group of an inventory, a scenario of molecule and a variable of
one, and a benchmark."""


@cache
def find_known_variables() -> set[str]:
    """Return the options of roles and modules, the facts that roles set, and the variables that playbooks read."""
    names = {
        name
        for options in (*load_role_options().values(), *load_module_options().values())
        for name in list_option_names(options)
    }
    for path in (REPOSITORY / "roles").glob("*/tasks/*.yml"):
        for task in yaml.safe_load(path.read_text()) or []:
            names |= set(_find_set_facts(task))
    for path in (REPOSITORY / "playbooks").rglob("*.yml"):
        names |= {match[0] for match in _VARIABLE_PATTERN.finditer(path.read_text())}
    return names | {path.stem for path in (REPOSITORY / "playbooks").glob("*.yml")}


def _find_set_facts(task: Mapping[str, Any]) -> Iterator[str]:
    yield from task.get("ansible.builtin.set_fact") or {}
    for inner_task in (*(task.get("block") or []), *(task.get("always") or [])):
        yield from _find_set_facts(inner_task)


def find_unknown_variables(text: str) -> list[str]:
    """Return the variables in the fenced or inline code of ``text`` that nothing reads."""
    code_texts = [match[2] for match in _FENCE_PATTERN.finditer(text)]
    code_texts += re.findall(r"`([^`\n]+)`", _FENCE_PATTERN.sub("", text))
    return sorted(
        {match[0] for each in code_texts for match in _VARIABLE_PATTERN.finditer(each)}
        - find_known_variables()
        - _NON_VARIABLES
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_named_on_a_page_exist(page: Path) -> None:
    assert find_unknown_variables(page.read_text()) == []


def check_ansible_command(argv: list[str]) -> None:
    """Raise ValueError if an Ansible command names a playbook, module, role or variable that does not exist."""
    if argv[0] == "ansible-playbook":
        for word in argv[1:]:
            name = word.removeprefix(COLLECTION_PREFIX).replace(".", "/")
            if word.startswith(COLLECTION_PREFIX) and not (REPOSITORY / "playbooks" / f"{name}.yml").exists():
                raise ValueError(f"there is no playbook {word}")
        for option, value in itertools.pairwise(argv):
            name = value.partition("=")[0]
            if option in ("-e", "--extra-vars") and re.match(r"\w+=", value) and name not in find_words_in_playbooks():
                raise ValueError(f"no playbook and no role reads the variable {name}")
    elif argv[0] == "ansible-doc":
        for word in argv[1:]:
            plugin_paths = (REPOSITORY / "plugins").glob(f"*/{word.removeprefix(COLLECTION_PREFIX)}.py")
            if (
                word.startswith(COLLECTION_PREFIX)
                and word not in (*load_module_options(), *load_role_options())
                and not list(plugin_paths)
            ):
                raise ValueError(f"there is no {word}")


@cache
def find_words_in_playbooks() -> set[str]:
    """Return all words in the playbooks of the collection, and the options of roles."""
    texts = [path.read_text() for path in (REPOSITORY / "playbooks").rglob("*.yml")]
    options = {name for role_options in load_role_options().values() for name in list_option_names(role_options)}
    return options | {word for text in texts for word in re.findall(r"\w+", text)}


@pytest.mark.parametrize("block", find_blocks_in_languages("sh", "console", "bash", "text"))
def test_ansible_commands_name_existing_objects(block: Block) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        # The command may be a part of the line, for example in a crontab.
        match = re.search(r"\bansible-(playbook|doc) .*", line)
        if match:
            check_ansible_command(shlex.split(match[0], comments=True))


def test_an_unknown_name_is_detected() -> None:
    assert find_unknown_variables("Set `gateway_sokket` or `kvm_xfs_host_device`.") == ["gateway_sokket"]
    assert find_unknown_variables("```sh\necho install_colour\n```\n") == ["install_colour"]
    assert (
        find_unknown_variables("See `engine/gateway_nothing.py`, `sandbox_gateway_nothing` and gateway_nothing.") == []
    )
    invalid_commands = (
        "ansible-playbook grove.sandbox.install_hots",
        "ansible-playbook grove.sandbox.install_host -e install_knd=jail_zfs",
        "ansible-doc --type role grove.sandbox.gatway",
        "ansible-doc grove.sandbox.sandbox_cloud",
    )
    for line in invalid_commands:
        with pytest.raises(ValueError, match="no "):
            check_ansible_command(line.split())
    check_ansible_command(
        ["ansible-playbook", "-i", "hosts.ini", "grove.sandbox.install_host", "-e", "install_kind=jail_zfs"]
    )


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", find_blocks_in_languages("toml"))
def test_toml_is_a_valid_configuration_or_recipe(block: Block) -> None:
    data = tomllib.loads(block.text)
    if "name" not in data:
        Config.model_validate(data)
        return
    fields = CreateTemplate.model_fields
    assert data.keys() <= {field.alias or name for name, field in fields.items()}
    CreateTemplate.model_validate(data).build_recipe()


# --- commands --------------------------------------------------------------------------------------------------------


def split_commands(block: Block) -> Iterator[list[str]]:
    """Yield the simple commands in a shell block, without prompts, assignments or sudo. Pipelines are split."""
    is_console = block.language == "console"
    for line in block.text.replace("\\\n", " ").splitlines():
        if is_console:
            if not line.startswith(("$ ", "# ")):
                continue
            line = line[2:]
        words = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if word in ("|", "||", "&", "&&", ";", "(", ")"):
                if command:
                    yield command
                command = []
            elif command or not (word == "sudo" or re.match(r"\w+=", word)):
                command.append(word)


def parse_command(root: typer.Typer, argv: list[str]) -> None:
    """Parse a command line with the program's own parser, without running it. Raises ClickException."""
    command: Any = typer.main.get_command(root)
    parent: Any = None
    name, args = argv[0], [word for word in argv[1:] if word != ">"]
    while True:
        context = command.make_context(name, list(args), parent=parent)
        if not hasattr(command, "resolve_command"):
            check_values(context.params)
            return
        remaining_arguments = [*context._protected_args, *context.args]
        if not remaining_arguments:
            return
        name, subcommand, args = command.resolve_command(context, remaining_arguments)
        assert subcommand is not None, f"there is no command {remaining_arguments[0]}"
        command, parent = subcommand, context


VALUE_PARSERS: dict[str, Any] = {
    "memory": formats.parse_size,
    "disk": formats.parse_size,
    "size": formats.parse_size,
    "timeout": formats.parse_duration,
    "expires_in": formats.parse_duration,
    "metadata": lambda value: formats.parse_pairs(value, "metadata"),
    "env": lambda value: formats.parse_pairs(value, "an environment variable"),
    "on_timeout": OnTimeout,
    # Only the option, which is repeatable and therefore a list, and not the argument of a command.
    "volume": lambda value: [formats.parse_mount(each) for each in value if not isinstance(value, str)],
}
"""The program's parsers of values that its command line accepts as any text."""


def check_values(params: Mapping[str, Any]) -> None:
    for name, parse_value in VALUE_PARSERS.items():
        if params.get(name):
            parse_value(params[name])


PROGRAMS = {"sandboxctl": app.app, "sandbox-gateway": daemon.app}


def check_command(argv: list[str]) -> None:
    """Raise ValueError if a command line calls one of our programs incorrectly. Other programs are ignored."""
    program = Path(argv[0]).name
    if argv[0] == "./dev":
        command_names = re.findall(r"^    (\w+)\) ", (REPOSITORY / "dev").read_text(), re.MULTILINE)
        if argv[1] not in command_names:
            raise ValueError(f"./dev has no command {argv[1]}")
    elif program in PROGRAMS:
        try:
            parse_command(PROGRAMS[program], argv[: argv.index(">")] if ">" in argv else argv)
        except (click.exceptions.Exit, SystemExit):
            return
        except Exception as error:
            message = getattr(error, "message", "") or str(error) or type(error).__name__
            raise ValueError(f"{' '.join(argv)}: {message}") from None
        if program == "sandboxctl" and "exec" in argv and "--" not in argv:
            raise ValueError(f"{' '.join(argv)}: options go before SANDBOX, the program after --")


@pytest.mark.parametrize("block", find_blocks_in_languages("sh", "console", "bash"))
def test_commands_are_valid(block: Block) -> None:
    for argv in split_commands(block):
        check_command(argv)


def test_an_invalid_command_is_detected() -> None:
    invalid_commands = (
        "sandboxctl fly web",
        "sandboxctl create",
        "sandboxctl create web --colour red",
        "sandboxctl snapshot fork s1 --count many",
        "sandboxctl template build web --memory",
        "sandboxctl rollback web",
        "sandboxctl --nonsense list",
        "sandboxctl exec web --user root id",
        "sandbox-gateway serve --port 80",
        "sandboxctl create web --memory lots",
        "sandboxctl create web --on-timeout explode",
        "sandboxctl create web --metadata team",
        "sandboxctl create web --volume data",
        "sandboxctl volume create data --size lots",
        "./dev dance",
    )
    for line in invalid_commands:
        (argv,) = split_commands(Block(DOCS_DIRECTORY, 1, "sh", line))
        with pytest.raises(ValueError, match=r"."):
            check_command(argv)
    valid_block = Block(
        DOCS_DIRECTORY, 1, "sh", "A=1 sudo sandboxctl --json list | sandboxctl exec --stdin one -- tar -x > out\n"
    )
    assert [argv[0] for argv in split_commands(valid_block)] == ["sandboxctl", "sandboxctl"]
    for argv in split_commands(valid_block):
        check_command(argv)


# --- HTTP ------------------------------------------------------------------------------------------------------------


@cache
def list_routes() -> dict[str, set[str]]:
    """Return {path: methods} for all paths in the OpenAPI document."""
    return {
        path: {method.upper() for method in item} for path, item in serving.build_openapi_document()["paths"].items()
    }


def has_route(path: str, method: str) -> bool:
    fleet_routes = [(path, {method}) for method, path in ROUTES]
    for documented_path, methods in [*list_routes().items(), *fleet_routes]:
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(documented_path))
        if re.fullmatch(pattern, path) and method in methods:
            return True
    return False


def test_documented_routes_exist() -> None:
    for page in PAGES:
        for method, path in re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/[^`?\s]*)(?:\?[^`]*)?`", page.read_text()):
            assert has_route(path, method), f"{page.name}: there is no {method} {path}"


def test_every_route_is_documented() -> None:
    text = (DOCS_DIRECTORY / "api.md").read_text()
    for path, methods in list_routes().items():
        for method in methods:
            assert f"`{method} {path}`" in text, f"api.md does not describe {method} {path}"


@pytest.mark.parametrize("block", find_blocks_in_languages("sh", "console", "bash"))
def test_example_requests_use_existing_routes(block: Block) -> None:
    for argv in split_commands(block):
        if argv[0] != "curl" or any(word.lower().startswith("e2b-sandbox-") for word in argv):
            continue
        method = argv[argv.index("-X") + 1] if "-X" in argv else "GET"
        for word in argv:
            if word.startswith("http://gateway"):
                path = word.removeprefix("http://gateway").partition("?")[0]
                assert path == "/openapi.json" or has_route(path, method), f"{block}: there is no {method} {path}"


def test_every_error_kind_is_documented() -> None:
    classes = [errors.GatewayError, *errors.GatewayError.__subclasses__()]
    kinds_and_statuses = {(each.kind, each.status) for each in classes if each.__module__ == errors.__name__}
    rows = set(re.findall(r"^\| `(\w+)` \| (\d{3}) \|", (DOCS_DIRECTORY / "api.md").read_text(), re.MULTILINE))
    assert {(kind, int(status)) for kind, status in rows} == {*kinds_and_statuses, ("internal", 500)}


def test_every_event_is_documented() -> None:
    published_events = set()
    for path in (REPOSITORY / "gateway" / "src" / "sandbox_gateway" / "engine").rglob("*.py"):
        published_events |= set(re.findall(r"(?:publish|_progress)\(\s*\"([a-z]+\.[a-z-]+)\"", path.read_text()))
    text = (DOCS_DIRECTORY / "api.md").read_text()
    documented_events = set(re.findall(r"`((?:sandbox|snapshot|template|fork|volume)\.[a-z-]+)`", text))
    assert published_events == documented_events


SOURCE = REPOSITORY / "gateway" / "src"
PACKAGES = [path.parent.relative_to(SOURCE) for path in sorted(SOURCE.glob("*/**/__init__.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_the_overview_of_a_package_lists_every_module(package: Path) -> None:
    """In an overview, only modules of the package are between double backticks; other code is between single ones."""
    directory = SOURCE / package
    overview = ast.get_docstring(ast.parse((directory / "__init__.py").read_text())) or ""
    modules = {path.stem for path in directory.glob("*.py")} - {"__init__", "__main__"}
    modules |= {path.parent.name for path in directory.glob("*/__init__.py")}
    assert set(re.findall(r"``(\w+)``", overview)) == modules


def list_sections(path: Path, class_name: str) -> list[tuple[str, str]]:
    """Return the methods of a class, in order, each with the heading above it ("" before the first heading)."""
    text = path.read_text()
    (definition,) = [
        node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    sections = []
    heading = ""
    methods = {
        node.lineno: node.name for node in definition.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.fullmatch(r"    # -- (.+?) -+", line):
            heading = match[1]
        elif number in methods:
            sections.append((heading, methods[number]))
    return sections


@pytest.mark.parametrize(("kind", "class_name"), [("kvm_xfs", "KvmXfsHost"), ("jail_zfs", "JailZfsHost")])
def test_a_host_has_the_sections_of_its_interface_in_the_same_order(kind: str, class_name: str) -> None:
    directory = REPOSITORY / "gateway" / "src" / "sandbox_gateway" / "hosts"
    interface = list_sections(directory / "base.py", "Host")
    names = {name for _, name in interface}
    assert [each for each in list_sections(directory / kind / "host.py", class_name) if each[1] in names] == interface
    overview = ast.get_docstring(ast.parse((directory / "base.py").read_text())) or ""
    assert re.findall(r"^\* ([\w ]+):", overview, re.MULTILINE) == list(
        dict.fromkeys(heading for heading, _ in interface)
    )


def list_folders(directory: Path) -> set[str]:
    """Return the names of the visible folders in a directory that contain files."""
    return {
        path.name
        for path in directory.iterdir()
        if path.is_dir() and not path.name.startswith((".", "_")) and any(each.is_file() for each in path.rglob("*"))
    }


def test_the_map_in_the_readme_names_every_folder_and_role() -> None:
    section = (REPOSITORY / "README.md").read_text().partition("## Repository layout")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|(.*)\|$", section, re.MULTILINE)
    assert len(rows) <= 12
    paths = []
    for names in (re.findall(r"`([\w./*]+)`", path) for path, _ in rows):
        # A row may shorten a path: "`gateway/src/sandbox_gateway/api`, `server`".
        parent = names[0].rpartition("/")[0] if names[0].startswith("gateway/") else ""
        paths += [names[0], *(name if "/" in name or not parent else f"{parent}/{name}" for name in names[1:])]
    top_level = {path.partition("/")[0] for path in paths}
    assert top_level - {"CONTRIBUTING.md", "dev"} == {*list_folders(REPOSITORY), ".ci"}
    assert all(any(REPOSITORY.glob(path.rstrip("/"))) for path in paths)
    for parent in ("plugins", "gateway/src/sandbox_gateway"):
        assert {f"{parent}/{name}" for name in list_folders(REPOSITORY / parent)} <= set(paths)
    (roles,) = [text for path, text in rows if "`roles/`" in path]
    assert set(re.findall(r"`(\w+)`", roles)) == list_folders(REPOSITORY / "roles")


def test_the_index_of_the_code_names_every_role() -> None:
    text = (DOCS_DIRECTORY / "architecture.md").read_text()
    assert set(re.findall(r"`roles/(\w+)`", text)) == list_folders(REPOSITORY / "roles")


def test_the_contributing_page_names_every_folder_of_tests() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    durations, _, kinds = text.partition("## Debug a sandbox")
    folders = list_folders(REPOSITORY / "tests")
    assert folders <= set(re.findall(r"`tests/(\w+)`", durations))
    with_tests = {name for name in folders if any((REPOSITORY / "tests" / name).rglob("test_*.py"))}
    assert with_tests <= set(re.findall(r"`tests/(\w+)`", kinds))
    assert list_folders(REPOSITORY / "tests/unit") <= set(re.findall(r"`tests/unit/(\w+)`", kinds))


def test_the_readme_names_the_replaced_commands() -> None:
    commands = {path.name for path in (REPOSITORY / "tests/freebsd_shim/bin").iterdir()} - {"freebsd-shim"}
    readme = (REPOSITORY / "README.md").read_text()
    (listed,) = re.findall(r"FreeBSD's commands \(([^)]*)\)", readme)
    assert set(re.findall(r"`(\w+)`", listed)) == commands


def list_tests(path: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE))


def test_the_security_page_names_every_security_test() -> None:
    """The page must not name tests that do not exist either. Tests of other folders are named with their path."""
    folder = REPOSITORY / "tests" / "security"
    tests = {f"{path.name}::{name}" for path in folder.glob("test_*.py") for name in list_tests(path)}
    references = re.findall(r"`([\w/.]+\.py)::(\w+)`", (DOCS_DIRECTORY / "security.md").read_text())
    assert tests - {f"{file}::{name}" for file, name in references} == set(), "security.md does not name these tests"
    for file, name in references:
        path = REPOSITORY / file if "/" in file else folder / file
        assert path.exists() and name in list_tests(path), f"security.md: {file}::{name} does not exist"
