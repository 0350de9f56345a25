#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_template
short_description: Build templates of sandboxes, and pull them from registries
version_added: "0.1.0"
description:
  - Ensures that the named templates exist and are built from the given recipe, or that they do not exist.
  - The recipe is compared as a whole, and options that a task does not set have their default values. If the recipe is
    unchanged, nothing is built. A changed recipe builds a new template, which then takes over the name. Sandboxes
    created from the old template keep running. The old template is removed when the last of them is removed.
  - Every template also contains an agent and settings that come with the gateway. An upgrade of the gateway that
    changes them makes the template outdated. Outdated templates are rebuilt, unless O(rebuild_outdated=false).
  - The module waits for the build. If the build fails, the message shows the end of its log.
options:
  name:
    description:
      - The name or names of the templates. A name has 1 to 64 letters, digits, C(_), C(.) or C(-), and starts with a
        letter or digit. Sandboxes, snapshots, templates and volumes share one namespace.
    type: list
    elements: str
    required: true
    aliases: [names]
  state:
    description:
      - V(present) means that the template exists and is built from the recipe. V(absent) means that it does not exist.
    type: str
    choices: [present, absent]
    default: present
  from:
    description:
      - The source of the file system. V(debootstrap) installs Debian packages; V(rootfs) copies the directory or
        tarball O(path); V(image) unpacks the OCI image O(image). V(artifact) builds nothing, and pulls the complete
        template O(artifact) from a registry.
      - The default is V(artifact) if O(artifact) is set, V(image) if O(image) is set, and V(debootstrap) otherwise.
    type: str
    choices: [debootstrap, rootfs, image, artifact]
  suite:
    description:
      - Debian suite. Other sources accept only the default.
    type: str
    default: bookworm
  mirror:
    description:
      - APT mirror to build from. If empty, the APT sources of the gateway's host are used.
      - Other sources than V(debootstrap) accept no mirror.
    type: str
    default: ""
  packages:
    description:
      - Debian packages to install. Their order does not matter.
    type: list
    elements: str
    default: []
  path:
    description:
      - Absolute path of a directory or a tarball, compressed or not, on the gateway's host.
      - Required if O(from=rootfs). Changes to the contents at the same path are not detected.
    type: str
    default: ""
  image:
    description:
      - An OCI or Docker image. C(docker://registry.example/name:tag), or simply C(registry.example/name:tag), names an
        image in a registry. C(oci:/directory:tag), C(oci-archive:/file) and C(docker-archive:/file) name one on the
        gateway's host. Only hosts of virtual machines build templates from images.
      - Required if O(from=image). The module does not detect that a tag now names a different image. Use a new tag, or
        a digest (C(registry.example/name@sha256:...)).
    type: str
    default: ""
  dockerfile:
    description:
      - Path of a Dockerfile on the managed host. The gateway translates it to O(image), O(setup) and O(start_command).
        C(RUN) and C(COPY) are carried out inside the machine that becomes the template, and C(CMD) and C(ENTRYPOINT)
        are its start command. C(RUN) has no network, unless O(setup_network=true).
      - The Dockerfile must have a single stage. C(ADD), C(HEALTHCHECK), C(ONBUILD), C(SHELL), C(VOLUME), and flags such
        as C(--mount) and C(COPY --from) are refused. C(EXPOSE), C(LABEL), C(MAINTAINER) and C(STOPSIGNAL) have no
        effect.
      - O(setup) runs after the steps of the Dockerfile, and O(start_command) replaces its start command.
      - A change to a line or to a copied file builds a new template. Times and owners of files do not matter.
      - It cannot be combined with O(image), O(packages), O(path) or O(artifact).
    type: path
  context:
    description:
      - Path of the directory on the managed host from which C(COPY) in O(dockerfile) copies files. C(.dockerignore) in
        it, or C(NAME.dockerignore) beside the Dockerfile, excludes files.
      - The default is the directory of the Dockerfile.
    type: path
  registry_username:
    description:
      - The user name for the registry of O(image). The gateway uses it for one build and does not store it. Without it,
        the gateway uses the credentials in its configuration, if any.
      - The recipe does not include it. If only the user name or the password has changed, nothing is built.
    type: str
  registry_password:
    description:
      - The password for O(registry_username). Take it from Ansible Vault or another lookup.
      - Results, logs and plans do not contain it.
    type: str
  artifact:
    description:
      - A template in an OCI registry, C(REGISTRY/REPOSITORY:TAG) or C(REGISTRY/REPOSITORY@DIGEST), that
        C(sandboxctl template push) has pushed. The gateway's configuration must allow the registry.
      - Required if O(from=artifact). The other options of the recipe are then ignored.
      - If the template was already created from this artifact, nothing is changed, even if the artifact no longer
        exists. If the tag names a different template, that template is pulled and takes over the name.
    type: str
    default: ""
  trust:
    description:
      - Fingerprints of the gateways whose artifacts are accepted by O(artifact), in addition to the pulling gateway.
        C(sandboxctl snapshot signer) shows the fingerprint of a gateway.
    type: list
    elements: str
  setup:
    description:
      - Commands to run in the booted sandbox, one after another, as root through C(/bin/sh -c).
    type: list
    elements: str
    default: []
  start_command:
    description:
      - A command to start after O(setup). It keeps running while the template is captured.
      - With O(from=image), the default is the image's entry point with its arguments, environment, user and working
        directory.
    type: str
    default: ""
  ready_probe:
    description:
      - A command to run every half second until it exits with 0. The template is captured after that.
    type: str
    default: ""
  ready_timeout:
    description:
      - Time limit in seconds for O(ready_probe) to succeed.
    type: float
    default: 60
  setup_timeout:
    description:
      - Time limit in seconds for O(setup).
    type: float
    default: 1800
  setup_network:
    description:
      - Whether the machine has access to the network during the build. It does not affect sandboxes created from the
        template.
      - The default is V(false) with O(dockerfile), and V(true) otherwise.
    type: bool
  cpus:
    description:
      - Number of virtual CPUs of a sandbox created from the template.
    type: int
    default: 1
  memory_mb:
    description:
      - Memory of a sandbox created from the template, in MiB.
    type: int
    default: 256
  disk_mb:
    description:
      - Disk size of a sandbox created from the template, in MiB.
    type: int
    default: 2048
  prewarm:
    description:
      - Number of forks to keep ready, so that new sandboxes start in milliseconds. Each uses memory of the host like a
        running sandbox. Forks with volumes, with other sizes or with a cold start do not use them.
      - If set, the number of an existing template is changed. If not set, an existing template keeps its number, and a
        template that is built has none.
      - Only hosts of virtual machines support numbers other than V(0), and only for templates with memory.
    type: int
  rebuild_outdated:
    description:
      - Whether to rebuild a template with the same recipe if it is outdated, as shown in RV(templates[].outdated).
      - If V(false), such a template is not changed. A changed recipe is always built.
      - Sandboxes of the old template do not change. After the rebuild, tasks that declare them with
        O(grove.sandbox.sandbox#module:template) are refused, unless they set
        O(grove.sandbox.sandbox#module:recreate=true).
    type: bool
    default: true
  wait_timeout:
    description:
      - Time limit in seconds for the build. With V(0), the module does not wait for it.
      - If a build of the same recipe is already running, the module waits for that build, and changes nothing.
    type: int
    default: 3600
  when_unused:
    description:
      - By default, O(state=absent) fails if the template is in use. The message lists the resources that use it.
      - If V(true), the template is hidden now and removed when its last sandbox is removed.
    type: bool
    default: false
  continue_on_error:
    description:
      - By default, nothing is changed if any name is invalid, and the task stops at the first action that fails.
      - If V(true), every name is tried, and RV(outcomes) contains each result. The task fails if any action failed.
    type: bool
    default: false
extends_documentation_fragment:
  - grove.sandbox.gateway
  - grove.sandbox.attributes
attributes:
  check_mode:
    support: partial
    details:
      - Check mode cannot predict that a build fails. If the gateway's host is almost full, it can only estimate whether
        there is room for the build.
      - C(ansible-playbook --check) detects that O(path) or O(image) does not exist, but only if the API key has the
        scope V(admin) or the module uses the gateway's socket. For other keys, the gateway does not read the path or
        the image. With O(artifact), check mode reads its manifest, and always needs such a key.
      - If earlier tasks of the run write O(dockerfile) or files of O(context), check mode reads the current files.
author:
  - The grove.sandbox authors (@grove-sandbox)
seealso:
  - module: grove.sandbox.sandbox
  - module: grove.sandbox.sandbox_snapshot
  - module: grove.sandbox.sandbox_template_info
"""

EXAMPLES = r"""
---
- name: Build a template with a running web server
  grove.sandbox.sandbox_template:
    name: web-base
    packages: [nginx-light, curl]
    setup:
      - echo hello > /var/www/html/index.html
    start_command: nginx -g 'daemon off;'
    ready_probe: curl -fs http://localhost/
    memory_mb: 512

- name: Build a template from a tarball on the gateway's host
  grove.sandbox.sandbox_template:
    name: from-image
    from: rootfs
    path: /srv/images/base.tar.zst

- name: Build a template from an image, whose entry point it starts
  grove.sandbox.sandbox_template:
    name: api
    image: registry.example/team/api:1.4
    ready_probe: test -e /run/api.pid

- name: Build a template from a Dockerfile whose RUN installs packages
  grove.sandbox.sandbox_template:
    name: from-dockerfile
    dockerfile: /srv/api/Dockerfile
    setup_network: true

- name: Build a template from an image in a registry that requires a login
  grove.sandbox.sandbox_template:
    name: internal
    image: registry.example/team/internal:2
    registry_username: reader
    registry_password: "{{ vault_registry_password | default('an example') }}"

- name: Pull a template that a different gateway has built and pushed
  grove.sandbox.sandbox_template:
    name: python
    artifact: registry.example/team/python:3.12
    trust: ["{{ pushing_gateway_fingerprint }}"]

- name: Build a template, and keep four sandboxes of it ready
  grove.sandbox.sandbox_template:
    name: runner
    packages: [git]
    prewarm: 4

- name: Do not rebuild a template after an upgrade of the gateway
  grove.sandbox.sandbox_template:
    name: pinned
    packages: [curl]
    rebuild_outdated: false

- name: Remove them once they are unused
  grove.sandbox.sandbox_template:
    name: [web-base, from-image]
    state: absent
    when_unused: true
"""

RETURN = r"""
---
templates:
  description:
    - The named templates that exist, in the given order.
    - In check mode, values that only a run creates (dates, addresses) are V(null); for ids, see
      the attribute C(check_mode).
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    id: {description: Its id., type: str}
    name: {description: Its first name., type: str}
    names: {description: All its names., type: list, elements: str}
    description: {description: Its description., type: str}
    status: {description: "V(ready), V(building) or V(error).", type: str}
    build_id: {description: The id of its build., type: str}
    digest: {description: Digest of its recipe., type: str}
    outdated:
      description:
        - Whether it was built by a version of the gateway with a different agent or different settings.
        - V(null) if the gateway cannot determine it.
      type: bool
    recipe: {description: "Its recipe in canonical form, with the names of this module's options.", type: dict}
    memory: {description: How its memory was captured., type: str}
    memory_problem: {description: "Why its memory cannot be restored now; empty if it can.", type: str}
    cpus: {description: Number of virtual CPUs of a sandbox created from the template., type: int}
    memory_mb: {description: Memory of a sandbox created from the template in MiB., type: int}
    disk_mb: {description: Size of its disk in MiB., type: int}
    forks: {description: Number of existing sandboxes that were created from it., type: int}
    prewarm: {description: Number of its forks that the gateway keeps ready., type: int}
    created_at: {description: Time of creation (RFC 3339)., type: str}
    updated_at: {description: Time of the last change to its record (RFC 3339)., type: str}
    sandbox_host: {description: The name of its host., returned: in a fleet, type: str}
template:
  description: The only entry of RV(templates), or V(null) if the template does not exist.
  returned: if one name is given
  type: dict
outcomes:
  description: The actions for each name; in check mode, the predicted ones. Empty if nothing had to be done.
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    name: {description: The name., type: str}
    changed: {description: Whether anything changed., type: bool}
    actions: {description: "The actions, in order.", type: list, elements: str, sample: [build]}
    failed: {description: Whether an action failed., type: bool}
    failure: {description: "The failure, in the form of RV(failure); V(null) if there is none.", type: dict}
failure:
  description: The failure in machine-readable form.
  returned: failure
  type: dict
  contains:
    kind:
      description: >-
        A stable identifier of the kind of failure, such as V(not_found), V(in_use), V(name_taken), V(conflict),
        V(invalid), V(no_space), V(busy), V(unsupported), V(timeout), V(backend_failed), V(unavailable),
        V(unauthorized), V(forbidden), V(unreachable), V(not_a_gateway) or V(too_old).
      type: str
    message: {description: The same text as RV(msg)., type: str}
    blockers: {description: Ids or names of the resources that prevent the change., type: list, elements: str}
    status: {description: HTTP status of the gateway's response; V(null) without a response., type: int}
msg:
  description: The error message, with a remedy.
  returned: failure
  type: str
"""

from ansible_collections.grove.sandbox.plugins.module_utils import _template
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_template)


if __name__ == "__main__":
    main()
