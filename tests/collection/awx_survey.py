"""The checks that AWX 24 applies to surveys and to their answers."""

from __future__ import annotations

from typing import Any

ANSWER_TYPES: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "textarea": str,
    "password": str,
    "multiplechoice": str,
    "multiselect": (str, list),
    "integer": int,
    "float": (float, int),
}
QUESTION_KEYS = {
    *("type", "question_name", "question_description", "variable", "required"),
    *("default", "choices", "min", "max", "new_question"),
}


def find_problem(survey: Any) -> str:
    """Return the first error in a survey, or an empty string if it is valid."""
    if not isinstance(survey, dict) or survey.keys() != {"name", "description", "spec"}:
        return "a survey has a name, a description and a spec"
    if not isinstance(survey["spec"], list) or not survey["spec"]:
        return "'spec' doesn't contain any items."
    variables = [question.get("variable") for question in survey["spec"]]
    if len(set(variables)) < len(variables):
        return "a variable is asked for twice"
    return next(filter(None, map(_check_question, survey["spec"])), "")


def _check_question(question: dict[str, Any]) -> str:
    name = question.get("variable")
    if unknown := question.keys() - QUESTION_KEYS:
        return f"{name}: unknown {sorted(unknown)}"
    for key, kind in (("type", str), ("question_name", str), ("variable", str), ("required", bool)):
        if not isinstance(question.get(key), kind):
            return f"'{key}' missing from survey question {name}, or of another type"
    if question["type"] not in ANSWER_TYPES:
        return f"{name}: {question['type']} is not one of the allowed question types"
    if any(not isinstance(question.get(key), int | None) for key in ("min", "max")):
        return f"{name}: the limit is expected to be integer"
    has_choices = question["type"] in ("multiplechoice", "multiselect")
    if has_choices and not question.get("choices"):
        return f"{name}: a question of type {question['type']} must specify choices"
    default = question.get("default", "")
    if default == "":
        return ""
    if not isinstance(default, ANSWER_TYPES[question["type"]]) or isinstance(default, bool):
        return f"{name}: default value {default!r} is of another type"
    return "; ".join(check_answer(question, default))


def check_answers(survey: dict[str, Any], answers: dict[str, Any], *, allow_other_variables: bool) -> list[str]:
    """Return the errors in the answers. ``allow_other_variables`` allows variables outside the survey."""
    errors = []
    for question in survey["spec"]:
        name = question["variable"]
        if name in answers:
            errors += check_answer(question, answers[name])
        elif question["required"]:
            errors.append(f"'{name}' value missing")
    survey_variables = {question["variable"] for question in survey["spec"]}
    return (
        errors
        if allow_other_variables
        else errors + [f"Variables {name} are not allowed on launch" for name in answers.keys() - survey_variables]
    )


def check_answer(question: dict[str, Any], answer: Any) -> list[str]:
    name, kind = question["variable"], question["type"]
    if kind in ("multiplechoice", "multiselect"):
        values = answer if isinstance(answer, list) else [answer]
        return [
            f"Value {each} for '{name}' expected to be one of the choices"
            for each in values
            if each not in question["choices"]
        ]
    if not isinstance(answer, ANSWER_TYPES[kind]) or isinstance(answer, bool):
        return [f"Value {answer!r} for '{name}' expected to be {kind}"]
    size = len(answer) if isinstance(answer, str) else answer
    minimum, maximum = question.get("min"), question.get("max")
    errors = [f"'{name}' is too small"] if minimum is not None and size < minimum else []
    return errors + ([f"'{name}' is too large"] if maximum is not None and size > maximum else [])


def collect_default_answers(survey: dict[str, Any]) -> dict[str, Any]:
    return {each["variable"]: each["default"] for each in survey["spec"] if "default" in each}
