"""List all benches in the order in which they run. To add one, create a file here and add its class to BENCHES."""

from __future__ import annotations

from benchmarks.benches.blank import Blank
from benchmarks.benches.boot import Boot
from benchmarks.benches.changed import Changed
from benchmarks.benches.cli import Cli
from benchmarks.benches.clone import Clone
from benchmarks.benches.connection import Connection
from benchmarks.benches.crowd import Crowd
from benchmarks.benches.dirty import Dirty
from benchmarks.benches.fleet import Fleet
from benchmarks.benches.fleet_scale import FleetScale
from benchmarks.benches.fork import Fork
from benchmarks.benches.http import Http
from benchmarks.benches.idle import Idle
from benchmarks.benches.image import Image
from benchmarks.benches.jail import JailZfs
from benchmarks.benches.jail_growth import JailGrowth
from benchmarks.benches.jail_scale import JailScale
from benchmarks.benches.memory import Memory
from benchmarks.benches.migration import Migration
from benchmarks.benches.move import Move
from benchmarks.benches.pause import Pause
from benchmarks.benches.plans import Plans
from benchmarks.benches.prewarm import Prewarm
from benchmarks.benches.profile import Profile
from benchmarks.benches.rivals import Rivals
from benchmarks.benches.rollback import Rollback
from benchmarks.benches.scale import Scale
from benchmarks.benches.sdk import Sdk
from benchmarks.benches.tasks import Tasks
from benchmarks.benches.transfer import Transfer
from benchmarks.measure import Bench

BENCHES: tuple[Bench, ...] = (
    Pause(),
    Dirty(),
    Changed(),
    Crowd(),
    Fork(),
    Profile(),
    Blank(),
    Migration(),
    Boot(),
    Prewarm(),
    Rollback(),
    Clone(),
    Idle(),
    Http(),
    Cli(),
    Fleet(),
    FleetScale(),
    Memory(),
    Scale(),
    Sdk(),
    JailZfs(),
    JailGrowth(),
    JailScale(),
    Tasks(),
    Plans(),
    Transfer(),
    Move(),
    Image(),
    Connection(),
    Rivals(),
)
