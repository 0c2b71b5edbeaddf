"""All records, in the order of the table."""

from conformance import (
    adapters16,
    agreement,
    bindings,
    buffers,
    calibration,
    calls,
    casts,
    closures,
    constants,
    cost,
    display,
    doors,
    following,
    habits,
    islands,
    legitimate,
    losses,
    mismatch,
    narrow,
    orders,
    recompute,
    replays,
    resume,
    scaling,
    settings,
    several,
    sums,
    tables,
    transforms,
    windows,
)
from conformance import range as range_

MODULES = (
    *(narrow, constants, range_, adapters16),
    *(scaling, calibration, replays, losses),
    *(orders, calls, legitimate, habits, several, windows, closures, following),
    *(buffers, settings),
    *(sums, tables, agreement),
    *(casts, islands, bindings, transforms, mismatch),
    *(resume, recompute, doors, cost, display),
)
RECORDS = [record for module in MODULES for record in module.RECORDS]
