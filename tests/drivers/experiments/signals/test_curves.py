"""Which rows a curve is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from castore import BackendError, FormatError, NotFoundError, Repository
from castore.testing.faulty import Fault, FaultyBackend
from castore_experiments.signals import Curves, Log, Source, publish
from castore_experiments.signals.batch import Batch, BatchName, Facts
from castore_experiments.signals.parquet import encode
from tests.helpers import overwrite, with_backend

H1, H2 = "1" * 24, "2" * 24


def steps(curves: Curves, *arguments: str | None, **more: str | None) -> dict[int, float]:
    frame = curves.signals(*arguments, **more)  # type: ignore[arg-type]
    found = dict(zip(frame["step"].tolist(), frame["metric_value"].tolist(), strict=True))
    assert len(found) == len(frame) and list(found) == sorted(found)
    return found


def test_rewinds_show_one_value_for_each_step(repository: Repository, wal: Path) -> None:
    """DB9: log 0..212, checkpoint at 200, resume at 200, log 201..230, resume at 220, log on."""
    with Log(repository, "exp", wal) as log:
        first = log.run
        for i in range(213):
            log.log("loss", 1, i, H1)
        second = log.begin(first, 200)
        for i in range(201, 231):
            log.log("loss", 2, i, H1)
        log.flush()
        log.begin(second, 220)
        for i in range(221, 226):
            log.log("loss", 3, i, H1)
        curves = Curves([Source(repository, "exp")], live=log)
        expected = {i: 1 if i <= 200 else 2 if i <= 220 else 3 for i in range(226)}
        assert steps(curves, "loss") == steps(curves, "loss", H1) == expected
    assert steps(curves, "loss") == expected
    assert steps(curves, "loss", run=first) == dict.fromkeys(range(213), 1)
    assert steps(curves, "loss", run=second) == {i: 1 if i <= 200 else 2 for i in range(231)}
    with pytest.raises(NotFoundError, match="no run 'gone'"):
        curves.signals("loss", run="gone")


def test_the_fork_step_itself_logged_again_wins(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 10, H1)
        log.begin(log.run, 10)
        log.log("loss", 2, 10, H1)
        log.log("loss", 3, 10, H1)
    assert steps(Curves([Source(local, "exp")]), "loss") == {10: 3}


def test_curves_of_branches_coexist(repository: Repository, wal: Path) -> None:
    """Seed: "switching between branches never overwrites another branch's curves — they coexist
    in the same file and the UI/queries filter by hash"."""
    with Log(repository, "exp", wal) as log:
        trunk = log.run
        for i in range(30):
            log.log("loss", 1, i, H1)
        log.begin(trunk, 10)
        for i in range(11, 20):
            log.log("loss", 2, i, H2)
    curves = Curves([Source(repository, "exp")])
    assert steps(curves, "loss", H1) == dict.fromkeys(range(30), 1)
    assert steps(curves, "loss", H2) == dict.fromkeys(range(11, 20), 2)
    assert steps(curves, "loss") == {i: 1 if i <= 10 else 2 for i in range(20)}
    assert curves.hashes() == [H1, H2]


def test_loading_an_older_step_mixes_no_old_points_in(local: Repository, wal: Path) -> None:
    """Issue: "loading an older step and going on does not mix old and new points of one curve"."""
    with Log(local, "exp", wal) as log:
        for i in range(100):
            log.log("loss", 1, i, H1)
            log.log("acc", 1, i, H1)
        log.begin(log.run, 50)
        log.log("loss", 2, 51, H1)
    curves = Curves([Source(local, "exp")])
    assert steps(curves, "loss", H1) == {i: 1 if i <= 50 else 2 for i in range(52)}
    assert steps(curves, "acc", H1) == dict.fromkeys(range(51), 1)


def test_a_resume_by_another_process_goes_on(repository: Repository, wal: Path) -> None:
    with Log(repository, "exp", wal) as log:
        parent = log.run
        for i in range(5):
            log.log("loss", 1, i, H1)
    with Log(repository, "exp", wal, parent=parent, fork_step=2) as log:
        log.log("loss", 2, 3, H1)
        run = log.run
    curves = Curves([Source(repository, "exp")])
    assert steps(curves, "loss") == {0: 1, 1: 1, 2: 1, 3: 2}
    newest = curves.newest_run()
    assert newest is not None and (newest.id, newest.parent, newest.fork_step) == (run, parent, 2)


def test_several_roots_read_as_one_history(repository: Repository, wal: Path) -> None:
    """Seed: "signal-history curves are merged from every one of them into the active logger, so
    training curves read as one continuous history"; "merging the same sibling twice ... never
    duplicates rows"."""
    with Log(repository, "v1", wal) as log:
        for i in range(10):
            log.log("loss", 1, i, H1)
    with Log(repository, "v2", wal) as log:
        for i in range(8, 15):
            log.log("loss", 2, i, H1)
    one, two = Source(repository, "v1"), Source(repository, "v2")
    for sources in ([two, one], [one, two], [two, one, one, two]):
        assert steps(Curves(sources), "loss") == {i: 1 if i < 8 else 2 for i in range(15)}
    assert len(list(repository.snapshots("v2.signals"))) == 1  # nothing of v1 was copied


def test_rows_without_a_hash_are_each_root_s_own(local: Repository, wal: Path) -> None:
    """What two roots logged before either had a hash are two curves, also at the same steps."""
    for name, value in (("v1", 1), ("v2", 2)):
        with Log(local, name, wal) as log:
            for i in range(3):
                log.log("loss", value, i, per_sample={"a": value})
            log.log("loss", value, 3, H1)
    one, two = Source(local, "v1"), Source(local, "v2")
    for sources in ([two, one], [one, two], [two, one, one, two]):
        curves = Curves(sources)
        found = curves.signals("loss")
        assert found["metric_value"].tolist() == [1, 2, 1, 2, 1, 2, 2]
        assert found["step"].tolist() == [0, 0, 1, 1, 2, 2, 3]
        assert len(curves.per_sample("loss")) == 6
    assert curves.signals("loss", H1)["metric_value"].tolist() == [2]


def test_rows_without_a_hash_stay_with_their_root_through_a_resumption(
    local: Repository, wal: Path
) -> None:
    """An ancestor's rows are its root's, too: the child's win over them and over no others."""
    for name, value in (("v1", 1), ("v2", 3)):
        with Log(local, name, wal) as log:
            first = log.run
            for i in range(3):
                log.log("loss", value, i)
            log.begin(first, 1)
            log.log("loss", value + 1, 1)
            log.log("loss", value + 1, 2)
    one, two = Source(local, "v1"), Source(local, "v2")
    assert steps(Curves([one]), "loss") == {0: 1, 1: 2, 2: 2}
    assert steps(Curves([two]), "loss") == {0: 3, 1: 4, 2: 4}
    for sources in ([one, two], [two, one]):
        found = Curves(sources).signals("loss")
        assert found["step"].tolist() == [0, 0, 1, 1, 2, 2]
        assert found["metric_value"].tolist() == [1, 3, 2, 4, 2, 4]


def test_a_copied_root_shows_its_own_line_only(local: Repository, wal: Path) -> None:
    with Log(local, "old", wal) as log:
        parent = log.run
        for i in range(10):
            log.log("loss", 1, i, H1)
    with Log(local, "new", wal, parent=parent, fork_step=4) as log:
        log.log("loss", 2, 5, H1)
    curves = Curves([Source(local, "new"), Source(local, "old", leads=False)])
    assert steps(curves, "loss") == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 2}


def test_unknown_names_and_an_empty_root_are_empty(repository: Repository) -> None:
    curves = Curves([Source(repository, "exp")])
    assert len(curves.signals("loss")) == len(curves.per_sample("loss", H1, None, "a")) == 0
    assert list(curves.signals("loss").columns)[:4] == [
        *("metric_name", "experiment_hash", "step", "metric_value")
    ]
    assert not curves.metrics() and not curves.hashes() and not curves.runs()
    assert curves.newest_run() is None


def test_rows_without_a_hash(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0)
        log.log("loss", 2, 0, H1)
        assert len(Curves([Source(local, "exp")], live=log).signals("loss")) == 2
    curves = Curves([Source(local, "exp")])
    assert curves.hashes() == [None, H1]
    assert curves.signals("loss")["experiment_hash"].isna().tolist() == [True, False]


def test_samples_one_value_for_each_point(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal) as log:
        for i in range(3):
            log.log("loss", None, i, H1, per_sample={"a": i, "b": -i})
        log.begin(log.run, 1)
        log.log("loss", None, 2, H1, per_sample={"b": 9})
    curves = Curves([Source(local, "exp")])
    found = curves.per_sample("loss")
    assert found[["step", "sample_id", "value"]].values.tolist() == [
        *([0, "a", 0], [0, "b", 0], [1, "a", 1], [1, "b", -1], [2, "b", 9])
    ]
    assert curves.per_sample("loss", sample_id="a")["step"].tolist() == [0, 1]
    assert len(curves.signals("loss")) == 0 and curves.metrics("per_sample") == ["loss"]


def test_rows_not_flushed_count_while_a_flush_runs(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal, interval=0.001, minute=0.005) as log:
        curves = Curves([Source(local, "exp")], live=log)
        for i in range(150):
            log.log("loss", i, i, H1)
            if i % 5 == 0:
                assert len(steps(curves, "loss")) == i + 1


@pytest.mark.parametrize("second", [H2, None])
def test_hashes_of_rows_not_flushed_whose_words_differ(
    local: Repository, wal: Path, second: str | None
) -> None:
    """Each look takes the rows so far together; the next ones have other words."""
    with Log(local, "exp", wal) as log:
        curves = Curves([Source(local, "exp")], log)
        for step, hash in enumerate((H1, second)):
            log.log("loss", step, step, hash)
            log.log(f"m{step}", step, step, hash)
            assert curves.signals("loss")["step"].tolist() == [*range(step + 1)]
        assert {*curves.hashes()} == {H1, second}
        assert curves.metrics() == ["loss", "m0", "m1"]


def test_metrics_too_many_to_list_are_read_from_the_files(
    local: Repository, wal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "LISTED", 10)
    with Log(local, "exp", wal) as log:
        for i in range(20):
            log.log(f"metric-{i:02d}", 1, 0, H1)
    curves = Curves([Source(local, "exp")])
    assert curves.sources[0].metrics("signals") == set()
    assert len(curves.metrics()) == 20


def test_a_curve_is_found_across_files_and_groups(
    local: Repository, wal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castore_experiments.signals.parquet.FILE_ROWS", 64)
    monkeypatch.setattr("castore_experiments.signals.parquet.GROUP_ROWS", 8)
    with Log(local, "exp", wal) as log:
        for i in range(100):
            for name in ("é", "a", "zz", "m"):
                for hash in (H1, None, H2):
                    log.log(name, i, i, hash)
    source = Source(local, "exp", cache=1000)
    for name in ("é", "a", "zz", "m"):
        assert steps(Curves([source]), name, H1) == {i: i for i in range(100)}
        assert len(Curves([source]).signals(name)) == 300
    assert source._cached <= 1000


def test_a_damaged_file_is_an_error_that_names_it(local: Repository, wal: Path) -> None:
    from castore import CorruptObjectError

    with Log(local, "exp", wal) as log:
        log.log("loss", 1, 0, H1)
    for stat in list(local.backend.list("objects")):
        if stat.size > 2000:
            overwrite(local, stat.name, local.backend.get(stat.name)[:-1] + b"x")
    with pytest.raises(CorruptObjectError):
        Curves([Source(local, "exp")]).signals("loss")


def test_a_file_that_is_no_parquet_is_an_error_that_names_it(local: Repository) -> None:
    from castore import Draft, MemoryFile

    name = BatchName("0" * 15 + "1", 1, 1)
    from castore_experiments.signals.batch import RowsFile

    file = RowsFile("signals/00000.parquet", 1, ("loss", None), ("loss", None))
    facts = Facts((file,), (), {}, {}).to_json(name)
    draft = Draft({file.path: MemoryFile(b"no")}, key=name.key, facts=facts, driver="experiments")
    local.commit(draft, namespace="exp.signals")
    with pytest.raises(FormatError, match=r"exp.signals@.*:signals/00000.parquet: not a Parquet"):
        Curves([Source(local, "exp")]).signals("loss")


def test_a_compaction_beside_a_reader_harms_nothing(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal) as log:
        for i in range(6):
            log.log("loss", i, i, H1)
            log.flush()
        source = Source(local, "exp")
        source.refresh()
    # The six snapshots are merged and forgotten by now; what was listed can still be read.
    assert sum(r.num_rows for r in source.rows("signals", "loss", None)) == 6
    assert steps(Curves([source]), "loss") == {i: i for i in range(6)}


def test_a_refresh_that_fails_goes_on_where_it_was(local: Repository, wal: Path) -> None:
    """However many batches there are: else one bad read in a thousand would end them all."""
    with Log(local, "exp", wal) as log:
        for i in range(6):
            log.log("loss", i, i, H1)
            log.flush()
        faulty = FaultyBackend(local.backend, [Fault("fail", 4, 1, "get", "snapshots/")])
        source = Source(with_backend(local, faulty), "exp")
        with pytest.raises(BackendError):
            source.refresh()
        faulty.calls.clear()
        source.refresh()
        read = [c for c in faulty.calls if c.method == "get" and c.name.startswith("snapshots/")]
        assert len(source.batches()) == 6
        assert len(read) == 3


def test_merging_is_tried_again_after_a_failure_but_not_at_once(
    local: Repository, wal: Path
) -> None:
    faulty = FaultyBackend(local.backend)
    with Log(with_backend(local, faulty), "exp", wal) as log:
        for i in range(6):
            log.log("loss", i, i, H1)
            log.flush()
        faulty.plan.append(Fault("fail", 1, 1, "get", "objects/"))
        faulty._seen.append(0)
        outcomes = []
        for _ in range(4):
            try:
                log._ladder.compact(all=True)
                outcomes.append(len(list(local.snapshots("exp.signals"))))
            except BackendError:
                outcomes.append(-1)
        assert outcomes == [-1, 6, 6, 1]
    assert steps(Curves([Source(local, "exp")]), "loss") == {i: i for i in range(6)}


def test_merging_keeps_every_row_and_touches_only_its_own(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal, writer="0" * 15 + "b") as other:
        other.log("other", 1, 0, H1)
        other.flush()
        with Log(local, "exp", wal, writer="0" * 15 + "a") as log:
            for i in range(40):
                log.log("loss", i, i, H1, per_sample={"a": i})
                log.flush()
                if i % 10 == 9:
                    log._ladder.compact(all=False)
        keys = sorted(n.key for n in local.snapshots("exp.signals"))
        assert keys == [f"w{'0' * 15}a.1.80", f"w{'0' * 15}b.1.1"]
    curves = Curves([Source(local, "exp")])
    assert steps(curves, "loss", run=f"{'0' * 15}a.0") == {i: i for i in range(40)}
    assert len(curves.per_sample("loss", run=f"{'0' * 15}a.0")) == 40


def test_eight_of_a_size_merge_and_large_ones_rest() -> None:
    def tail(sizes: list[int], *, all: bool = False) -> int:
        batches, at = [], 1
        for size in sizes:
            batches.append(Batch(None, BatchName("0" * 16, at, at + size - 1)))  # type: ignore[arg-type]
            at += size
        return publish._tail(batches, all=all)

    assert tail([10] * 7) == 0 and tail([10] * 8) == 8
    assert tail([1 << 20, *[10] * 7]) == 0 and tail([1 << 20, *[10] * 8]) == 8
    assert tail([1 << 18] * 8) == 8 and tail([1 << 18] * 8 + [10] * 3) == 11
    assert tail([1 << 20] * 8) == 0
    assert tail([1 << 20] * 8, all=True) == 4 and tail([5], all=True) == 1


def test_rows_of_a_file_are_sorted_and_its_ends_are_told(local: Repository, wal: Path) -> None:
    with Log(local, "exp", wal) as log:
        for i in (3, 1, 2):
            log.log("b", i, i, H2)
            log.log("b", i, i, None)
            log.log("a", i, i, H1)
        ((file, data),) = encode("signals", log.unflushed()["signals"])
        assert (file.first, file.last, file.rows) == (("a", H1), ("b", H2), 9)
        assert data[:4] == b"PAR1"
        assert not file.may_hold("aa", "0" * 24) or file.may_hold("aa", H1)
        assert not file.may_hold("c", None) and file.may_hold("b", H1)
