"""The job from start to finish: plan, smoke test, tokens, states, publishing, report."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.fill import fill_store
from dspark_store.precompute.job import Job, check_identity, existing_record, plan_job
from dspark_store.precompute.job_target import JobTarget, describe_target, plan_target
from dspark_store.precompute.ranks import World, join_world
from dspark_store.precompute.report import print_report
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.precompute.undo import new_folders_undone
from dspark_store.readers.cache import open_cache
from dspark_store.readers.verify import verify_store
from dspark_store.text import say
from dspark_store.writers.recovery import sweep_finished


def run(config: PrecomputeConfig) -> int:
    """Do the job, alone or as one of the ranks that torchrun has started; return the exit code 0.

    Raises built-in exceptions for whatever a user can get wrong (ValueError, OSError, ImportError), before anything
    of an existing store is touched, and StoppedError when another rank or a signal ends the job.
    """
    config.check()
    with join_world(60 * config.timeout_minutes) as world:
        return _lead(config, world) if world.leads else _follow(config, world)


def _lead(config: PrecomputeConfig, world: World) -> int:
    storage = LocalStorage(config.output_dir)
    recorded = existing_record(storage, resume=config.resume)
    job = plan_job(config, recorded=recorded)
    plan = plan_target(config, world.size, job.target)
    if recorded is not None:
        check_identity(recorded, job.new_record, job.config)
        if recorded.complete:
            sweep_finished(storage, recorded)
            world.share("todo", lambda: "nothing")
            say(f"{config.output_dir} is complete; nothing to do")
            return 0
    target = JobTarget(config, world, plan, job.target.num_layers)
    with new_folders_undone(storage.root):
        world.share("todo", lambda: "smoke" if config.smoke else "store")
        with target.groups_open():
            if config.smoke:
                _smoke(job, world, target)
            report = fill_store(world.scoped("store"), job, storage, target)
    if report is not None:
        print_report(open_cache(storage.root, allow_reduced_depth=True), report)
    return 0


def _follow(config: PrecomputeConfig, world: World) -> int:
    todo = world.receive("todo")
    if todo == "nothing":
        return 0
    described = describe_target(config)
    target = JobTarget(config, world, plan_target(config, world.size, described), described.num_layers)
    with target.groups_open():
        if todo == "smoke":
            scope = world.scoped("smoke")
            fill_store(scope, None, LocalStorage(str(scope.receive("place"))), target, smoke=True)
            scope.keys.add("tried", 1)
        fill_store(world.scoped("store"), None, LocalStorage(config.output_dir), target)
    return 0


def _smoke(job: Job, world: World, target: JobTarget) -> None:
    """Write the first samples end to end into a temporary store beside the real one, and check it."""
    config = replace(job.config, max_samples=min(job.config.smoke, job.config.max_samples or job.config.smoke), smoke=0)
    config = replace(config, max_refused=1.0)  # a share of so few rows says nothing about all of them
    parent = Path(config.output_dir).absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".smoke-", dir=parent))
    scope = world.scoped("smoke")
    try:
        small = plan_job(replace(config, output_dir=str(place), resume=False), job.target)
        scope.share("place", lambda: str(place))
        fill_store(scope, small, LocalStorage(place), target, smoke=True)
        others = world.size - 1  # a rank that comes late is tried out too, and must find the store
        world.wait_for(lambda: scope.keys.add("tried", 0) == others or None)
        cache = open_cache(place, allow_reduced_depth=True)
        problems = verify_store(cache)
        if problems:
            raise ValueError(f"the smoke test failed: {problems[0]} ({len(problems)} problems)")
        bad = int((cache.status != 0).sum())
        if bad == len(cache):
            raise ValueError(f"the smoke test failed: no sample is finite in {config.dtype}; take another --dtype")
        note = f"; {bad} are not finite in {config.dtype}" if bad else ""
        say(f"smoke test passed: {len(cache)} samples were written, read back and checked{note}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
