# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later


from __future__ import annotations

from ansible_collections.grove.sandbox.plugins.module_utils import _fork
from ansible_collections.grove.sandbox.plugins.plugin_utils._action import GatewayAction


class ActionModule(GatewayAction):
    resource_kind = _fork
