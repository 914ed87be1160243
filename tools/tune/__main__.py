"""``python -m tools.tune`` (docs/contributing/tuning.md): what is asked for, without what the cache has, is searched; every result
is kept at once."""

import os
import sys
from collections.abc import Sequence

from jax_core.caches import VARIABLE, cache_folder
from jax_core.tune.devices import device_name, versions
from jax_core.tune.lookup import remember, user_file, user_table
from jax_core.tune.table import PASSES
from tools.tune.arguments import parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all was found, 1 if a part was not, 2 if the request cannot be."""
    options = parsed(None if arguments is None else list(arguments))
    if options.cache is not None:
        os.environ[VARIABLE] = options.cache
    # The workers share a GPU; JAX reads this when it starts, and so only then is the rest loaded.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from tools.tune import report, work

    try:
        works = work.asked(options)
    except (ValueError, NotImplementedError) as error:
        return _refused(str(error))
    device = device_name(works[0].problem.backend)
    if options.show:
        print(report.used(works, device))
        return 0
    if cache_folder() is None:
        return _refused(f"caches are off, so nothing that is found could be kept: set {VARIABLE}, or give --cache FOLDER")
    wanted = works if options.again else [one for one in works if not _is_cached(one.key, device)]
    shapes = sum(one.also + 1 for one in works)
    print(
        f"{device}: {shapes} shapes of {len(works)} configurations, {len(works) - len(wanted)} of them in {user_file(device)}",
        flush=True,
    )
    if options.dry_run or not wanted:
        print(report.plan(wanted) if wanted else "--again would search them again")
        return 0
    return _search(wanted, device, options)


def _search(wanted, device: str, options) -> int:
    from tools.tune import report, work

    all_done = []
    for done in work.run(wanted, options.workers, options.seconds, options.rounds):
        all_done.append(done)
        tuned = {way: result.tuned for way, result in done.results.items() if result.tuned is not None}
        if tuned:
            remember(device, {done.work.key: tuned})
        print(f"[{len(all_done)}/{len(wanted)}]", report.line(done), flush=True)
    print(report.summary(all_done))
    missing = sum(not _is_cached(one.key, device) for one in wanted)
    if missing:
        print(
            f"{missing} of {len(wanted)} problems were not searched to their end; the same command goes on where this one stopped"
        )
    return 1 if missing else 0


def _is_cached(key: str, device: str) -> bool:
    """Whether the cache has both passes, searched to the end with the versions that are installed."""
    passes = user_table(device).get(key, {})
    return set(passes) == set(PASSES) and all(tuned.complete and dict(tuned.versions) == versions() for tuned in passes.values())


def _refused(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
