"""Test parsing references to images."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.image_references import ImageReference, Transport, parse_image_reference

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
SKOPEO_NAMES = {
    "debian": "docker://docker.io/library/debian:latest",
    "python:3.12-slim": "docker://docker.io/library/python:3.12-slim",
    "docker://team/app": "docker://docker.io/team/app:latest",
    "docker://localhost/app:1": "docker://localhost/app:1",
    "docker://registry.example:5000/a/b_c/d-e:1.0_x": "docker://registry.example:5000/a/b_c/d-e:1.0_x",
    "docker://[::1]:5000/app:1": "docker://[::1]:5000/app:1",
    f"registry.example/app:1@{DIGEST}": f"docker://registry.example/app@{DIGEST}",
    "oci:/srv/image": "oci:/srv/image",
    "oci:/srv/image:1.0": "oci:/srv/image:1.0",
    "oci-archive:/srv/image.tar:1.0": "oci-archive:/srv/image.tar:1.0",
    "docker-archive:/srv/image.tar:registry.example:5000/app:1": (
        "docker-archive:/srv/image.tar:registry.example:5000/app:1"
    ),
}


@pytest.mark.parametrize("text", SKOPEO_NAMES)
def test_references_are_converted_to_skopeo_names(text: str) -> None:
    assert str(parse_image_reference(text)) == SKOPEO_NAMES[text]


@pytest.mark.parametrize(
    "text",
    [
        *("", "docker://", "docker:/app", "docker://App", "docker://host:port/app", "-option", "a b"),
        *("docker://app:", "docker://app@sha256:12", "docker://-host.example/app", "oci:relative/path", "oci:/a:"),
        *("oci:/a/../b", "oci:/a\0b", "dir:/srv/image", "docker-daemon:app:1", "oci:/a:b c", f"app:{'1' * 129}"),
        *("docker://registry.example/app\n", f"oci:/{'a' * 1100}"),
    ],
)
def test_other_references_are_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not valid: use docker://REGISTRY/NAME:TAG"):
        parse_image_reference(text)


@given(st.text(alphabet="ab/.:-_@[]0A\0 \n", max_size=30), st.sampled_from(["", "docker://", "oci:/", "oci-archive:/"]))
def test_an_accepted_reference_is_stable_and_cannot_be_an_option(text: str, prefix: str) -> None:
    try:
        image = parse_image_reference(prefix + text)
    except ValueError:
        return
    assert parse_image_reference(str(image)) == image
    assert str(image).startswith((f"{image.transport}:/",)) and "\0" not in str(image) and "\n" not in image.name
    assert (image.registry != "") == (image.transport is Transport.REGISTRY) == (image.path == "")


def test_a_name_without_a_registry_belongs_to_docker_io() -> None:
    assert parse_image_reference("app:1") == ImageReference(
        Transport.REGISTRY, registry="docker.io", name="docker.io/library/app", tag="1"
    )
