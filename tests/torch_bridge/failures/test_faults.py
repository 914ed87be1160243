"""Ranks of one ring that do not do the same, in real processes: all end with words that say who asked for what, and soon."""

import re
from itertools import pairwise

import pytest
from launch import Ended, processes

from torch_bridge.failures.peers import EXIT_PEER_FAILURE

LIMIT = 3.0  # what faults.py gives to start()


def waits(ended: Ended) -> list[float]:
    """How long each call that raised has taken."""
    return [float(seconds) for seconds in re.findall(r"ended after ([\d.]+) s", ended.out)]


def works(ended: Ended) -> bool:
    return ended.status == 0 and ended.out.rstrip().endswith("works")


def test_an_invalid_call_of_one_rank_fails_on_all_and_the_ring_goes_on():
    healthy, failed = processes(2, "faults.py", "invalid_new")
    assert works(healthy) and works(failed), healthy.out + healthy.err + failed.out + failed.err
    assert max(waits(healthy) + waits(failed)) < LIMIT
    causes = (
        "ValueError: q and k must share the head dim; got q (1, 8, 2, 3)",
        "ValueError: k must be a torch.Tensor, got list",
        "ValueError: q_segment_ids must fit in int32",
        "ValueError: mask_mod is traced by JAX",
        "TypeError: ring_attention() got an unexpected keyword argument 'unknown'",
    )
    for cause in causes:
        assert f"ended after 0.0 s: {cause}" in re.sub(r"after \d\.\d", "after 0.0", failed.out), failed.out
        assert f"ValueError: this call of the ring of global ranks [0, 1] failed on global rank 1 ({cause}" in healthy.out, (
            healthy.out
        )


@pytest.mark.slow
def test_an_invalid_unshard_of_one_rank_fails_on_all_and_the_ring_goes_on():
    healthy, failed = processes(2, "faults.py", "invalid_unshard")
    assert works(healthy) and works(failed), healthy.out + healthy.err + failed.out + failed.err
    assert max(waits(healthy) + waits(failed)) < LIMIT
    for cause in ("a torch.Tensor is needed, got list", "unexpected keyword argument 'unknown'", "key_padding_mask must be (1, 4)"):
        assert cause in failed.out, failed.out
        assert re.search(rf"failed on global rank 1 \(\w+: .*{re.escape(cause)}", healthy.out), healthy.out
    for ended in (healthy, failed):
        assert re.search(r"unshard needs the same .*; got ring rank 0: .* dim=1 .*; ring rank 1: .* dim=7 ", ended.out), ended.out


@pytest.mark.slow
def test_the_backward_of_an_unshard_that_one_rank_does_not_make_ends():
    waiting, idle = processes(2, "faults.py", "no_unshard")
    assert waiting.status == EXIT_PEER_FAILURE, waiting.out + waiting.err
    assert "cannot go on in unshard backward step 2, on global rank 0: global rank 1 did not come" in waiting.err
    assert idle.at - waiting.at > LIMIT


@pytest.mark.slow
def test_an_invalid_first_call_of_one_rank_fails_on_all():
    for ended in processes(2, "faults.py", "invalid_first"):
        assert works(ended), ended.out + ended.err
        assert "q and k must share the head dim" in ended.out


@pytest.mark.slow
def test_an_error_that_all_ranks_make_is_each_ranks_own():
    for ended in processes(2, "faults.py", "invalid_everywhere"):
        assert works(ended), ended.out + ended.err
        assert "ValueError: scale must be a number" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("invalid_known", "ValueError: q and k must share the head dim"),
        ("fails_inside", "MemoryError: no room"),
    ],
)
def test_a_rank_inside_a_program_that_another_will_not_join_is_ended(way, cause):
    healthy, failed = processes(2, "faults.py", way)
    assert healthy.status == EXIT_PEER_FAILURE, healthy.out + healthy.err
    words = r"PeerFailure: the ring of global ranks \[0, 1\] cannot go on in forward step \d, on global rank 0: the call failed on "
    assert re.search(words + r"global rank 1 \(" + cause, healthy.err), healthy.err
    assert failed.status == 0, failed.err  # it had caught its own error
    assert failed.at - healthy.at > LIMIT  # and lives on for three times that


@pytest.mark.slow
def test_a_rank_that_goes_straight_on_after_its_invalid_call_is_not_paired_with_one_that_is_still_in_it():
    healthy, failed = processes(2, "faults.py", "skips_a_batch")
    assert "WRONG" not in healthy.out + failed.out, healthy.out + failed.out
    assert healthy.status == EXIT_PEER_FAILURE, healthy.out + healthy.err
    assert "cannot go on in forward step 4, on global rank 0: the call failed on global rank 1 (ValueError: q and k" in healthy.err
    assert failed.status == 1 and "batch 4" not in failed.out, failed.out + failed.err
    assert re.search(r"PeerFailure: the ring .* lost a member in the comparison .*: global rank 0 \(died\)", failed.err), failed.err


@pytest.mark.slow
def test_a_rank_that_is_told_before_it_enters_a_program_raises():
    healthy, failed = processes(2, "faults.py", "invalid_early")
    assert works(healthy) and works(failed), healthy.out + healthy.err
    assert "ValueError: this call of the ring of global ranks [0, 1] failed on global rank 1" in healthy.out


@pytest.mark.slow
def test_ranks_that_take_programs_apart_are_told_what_each_asked_for():
    compares, runs = processes(2, "faults.py", "apart")
    assert compares.status == 3 and max(waits(compares)) < LIMIT, compares.out + compares.err
    assert runs.status == EXIT_PEER_FAILURE, runs.out + runs.err
    for text in (compares.out, runs.err):
        assert "its ranks have made call 8 differently. Last asked for: global rank 0: in call 8, the comparison of query" in text
        assert re.search(r"; global rank 1: in call 8, forward step 2: query .* with {'causal': True", text), text


@pytest.mark.slow
def test_calls_that_were_paired_with_others_are_found_though_nobody_waits():
    for ended in processes(2, "faults.py", "skips_a_backward"):
        assert ended.status in (3, EXIT_PEER_FAILURE), ended.out + ended.err
        assert re.search(r"PeerFailure: .* its ranks have made call \d+ differently", ended.out + ended.err), ended.out + ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "status", "last"),
    [
        ("stops", EXIT_PEER_FAILURE, r"call 7, forward step 1: query .*'causal': True.*, which has ended"),
        ("never_calls", 3, r"call 2, the comparison of ring_attn.start\(.*\), which has ended"),
    ],
)
def test_a_rank_that_does_not_come_is_named_with_what_it_does(way, status, last):
    waiting, idle = processes(2, "faults.py", way)
    assert waiting.status == status, waiting.out + waiting.err
    for text in (waiting.out + waiting.err, idle.err):
        assert "global rank 1 did not come. Last asked for: global rank 0: in call " in text
        assert re.search(
            # The second where a busy machine keeps the idle rank's listener from answering in time.
            rf"; global rank 1: {last}; (it has been in no ring call for \d+ s, now at .*faults.py:\d+ in {way}|has not answered)",
            text,
        ), text
    if way == "stops":  # it comes after all, when nobody is there any more
        assert re.search(r"ended after 0.\d s: PeerFailure: .* on global rank 1: global rank 1 did not come", idle.out), idle.out
    assert idle.at - waiting.at > LIMIT  # it slept for four times that


@pytest.mark.slow
def test_a_device_that_does_not_finish_a_call_is_told_on_all_ranks():
    fine, stalled = processes(2, "faults.py", "device_stalls")
    assert fine.status == 3 and stalled.status == EXIT_PEER_FAILURE, fine.out + fine.err + stalled.out + stalled.err
    words = (
        r"the device of global rank 1 has not finished call \d+, forward step 1: a call, nor any other for \d+ s. "
        r"Last asked for: global rank 0: call \d+, forward step 1: a call, .*; global rank 1: in call \d+, forward step 1: a call. "
        r"Every rank of the ring has given this call to its device"
    )
    for text in (fine.out, stalled.err):
        assert re.search(words, text), text


@pytest.mark.slow
def test_a_device_that_waits_for_a_rank_that_compiles_is_at_no_fault():
    for ended in processes(2, "faults.py", "device_waits"):
        assert works(ended), ended.out + ended.err


@pytest.mark.slow
def test_hosts_that_do_not_come_out_of_a_call_are_told():
    for ended in processes(2, "faults.py", "hosts_stall"):
        assert ended.status == EXIT_PEER_FAILURE, ended.out + ended.err
        words = (
            r"the host of global rank \d has been in call \d+, forward step 1: a call, for \d s, and compiles nothing. Last asked"
        )
        assert re.search(words, ended.err) and "compiled for long" in ended.out, ended.out + ended.err


@pytest.mark.slow
def test_a_host_that_keeps_a_device_waiting_is_told():
    for ended in processes(2, "faults.py", "host_and_device_stall"):
        assert ended.status == EXIT_PEER_FAILURE, ended.out + ended.err
        assert re.search(r"the (host|device) of global rank \d has (been in|not finished) call \d+, forward step 1", ended.err), (
            ended.err
        )


@pytest.mark.slow
def test_no_call_lasts_in_silence_though_nobody_is_at_fault():
    of_device, of_host = processes(2, "faults.py", "lasts")
    assert works(of_device) and works(of_host), of_device.out + of_device.err + of_host.out + of_host.err
    for rank, ended, what in ((0, of_device, "waiting for its device, which has yet to end "), (1, of_host, "in ")):
        words = rf"ring_attn: global rank {rank} has been {what}forward step 1: a long call, for (\d) s"
        said = re.findall(words + r", now at .*faults.py:\d+ in lasts; py-spy dump --pid \d+ shows", ended.err)
        assert said and int(said[0]) < 3 and all(int(later) >= 2 * int(one) - 1 for one, later in pairwise(said)), ended.err


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named():
    waiting, _ = processes(2, "faults.py", "never_starts")
    assert waiting.status == 1
    assert "PeerFailure: the first ring call of a job" in waiting.err
    assert "global rank 1 asked for nothing in 3 s, while global rank 0 waited in it" in waiting.err


@pytest.mark.slow
def test_a_forward_of_one_rank_alone_is_told():
    alone, _ = processes(2, "faults.py", "forward_alone")
    assert alone.status == 3 and max(waits(alone)) < 2 * LIMIT, alone.out + alone.err
    assert "global rank 1 asked for nothing in 3 s, while global rank 0 waited in it" in alone.out, alone.out


@pytest.mark.slow
def test_a_rank_that_comes_to_the_start_when_another_has_given_up_is_told_so():
    gone, late = processes(2, "faults.py", "late")
    assert gone.status == 0 and "gave up" in gone.out, gone.out + gone.err
    assert max(waits(late)) < LIMIT, late.out
    assert "RuntimeError: JAX cannot start on rank 0: it gave up after 3 s without global rank 1" in late.out, late.out


@pytest.mark.slow
@pytest.mark.parametrize("way", ["slow", "slow_operator", "patient"])
def test_who_is_slow_is_waited_for(way):
    for ended in processes(2, "faults.py", way):
        assert works(ended), ended.out + ended.err


@pytest.mark.slow
def test_every_call_is_compared_where_that_was_asked_for():
    for ended in processes(2, "faults.py", "every_call"):
        assert works(ended), ended.out + ended.err
        assert max(waits(ended)) < LIMIT
        assert re.search(
            r"ValueError: every call .*; got ring rank 0: forward of .*; ring rank 1: forward of .*'causal': True", ended.out
        )


@pytest.mark.slow
def test_all_ranks_start_with_one_check():
    for ended in processes(2, "faults.py", "check_apart"):
        assert "refused: ring_attn.start must have the same check on all ranks" in ended.out, ended.out + ended.err
