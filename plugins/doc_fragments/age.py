# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later


from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  age_recipients:
    description:
      - Encrypt the file of O(export_to) with L(age,https://age-encryption.org) for these recipients. These are keys
        that begin with C(age1), or SSH public keys of the type C(ssh-ed25519) or C(ssh-rsa). One of their secret keys
        decrypts the file. The host where the module runs needs the program C(age), but no secret key.
      - Next to the file C(NAME), the task writes C(.NAME.exported), which says what the file contains. If both match
        the task, nothing is changed. Otherwise, the task exports again, and replaces the file, even if an encrypted
        file has no such record. A file that is not encrypted is replaced by an encrypted one, but not vice versa.
      - If the connection to the gateway is lost, the next export starts again.
    type: list
    elements: str
  age_identity:
    description:
      - Path of a file on the host where the module runs, with the secret key that decrypts O(import_from). It is a file
        that C(age-keygen) wrote, or an SSH private key without a passphrase. The host needs the program C(age).
      - Required for a file that is encrypted, and refused for any other. If the file was changed or is incomplete,
        nothing is imported.
      - If the connection to the gateway is lost, the next import sends the whole file.
    type: path
"""
