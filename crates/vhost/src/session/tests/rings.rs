//! When virtqueues start and stop, and what changes under them.

use super::*;

#[test]
fn a_ring_runs_while_it_has_a_kick_and_is_enabled() {
    let mut peer = Peer::with_memory();
    peer.set_up(0, 256);
    assert_eq!(peer.mock.taken(), [""; 0]);
    peer.vring(Request::SetVringEnable, 0, 1);
    assert_eq!(peer.mock.taken(), ["start 0 size 256 base 0x0"]);
    peer.vring(Request::SetVringEnable, 0, 1);
    assert_eq!(peer.mock.taken(), [""; 0]);
    peer.vring(Request::SetVringEnable, 0, 0);
    assert_eq!(peer.mock.taken(), ["stop 0"]);
    peer.vring(Request::SetVringEnable, 0, 1);
    assert_eq!(peer.mock.taken(), ["start 0 size 256 base 0x1000"]);
    assert_eq!(peer.get_vring_base(0), 0x1000);
    assert_eq!(peer.mock.taken(), ["stop 0"]);
    assert_eq!(peer.get_vring_base(0), 0x1000);
    peer.vring_fd(Request::SetVringKick, 0);
    assert_eq!(peer.mock.taken(), ["start 0 size 256 base 0x1000"]);
}

#[test]
fn an_enabled_ring_starts_at_its_kick() {
    let mut peer = Peer::with_memory();
    peer.vring(Request::SetVringEnable, 3, 1);
    peer.set_up(3, 128);
    assert_eq!(peer.mock.taken(), ["start 3 size 128 base 0x0"]);
}

#[test]
fn without_protocol_features_a_ring_runs_from_its_kick_on() {
    let mut peer = Peer::with_memory();
    peer.tell(Request::SetFeatures, SPLIT & !features::F_PROTOCOL_FEATURES);
    peer.mock.taken();
    peer.set_up(0, 8);
    assert_eq!(peer.mock.taken(), ["start 0 size 8 base 0x0"]);
}

#[test]
fn another_kick_restarts_the_ring_where_it_was() {
    let mut peer = Peer::with_memory();
    peer.set_up(0, 8);
    peer.vring(Request::SetVringEnable, 0, 1);
    peer.mock.taken();
    peer.vring_fd(Request::SetVringKick, 0);
    assert_eq!(peer.mock.taken(), ["stop 0", "start 0 size 8 base 0x1000"]);
}

#[test]
fn packed_rings_have_any_size_and_32_bits_of_base() {
    let mut peer = Peer::with_memory();
    peer.tell(Request::SetFeatures, SPLIT | features::F_RING_PACKED);
    peer.mock.taken();
    peer.set_up(1, 100);
    peer.vring(Request::SetVringBase, 1, 0x8000_8000);
    peer.vring(Request::SetVringEnable, 1, 1);
    assert_eq!(peer.mock.taken(), ["start 1 size 100 base 0x80008000"]);
    assert_eq!(peer.get_vring_base(1), 0x9000_9001);
}

#[test]
fn what_a_ring_lacks_is_named() {
    let mut peer = Peer::with_memory();
    let enable = VringState { index: 0, num: 1 };
    peer.tell_with(Request::SetVringEnable, enable.as_bytes(), Vec::new());
    let start =
        |peer: &mut Peer| peer.refused(Request::SetVringKick, 0u64.as_bytes(), vec![eventfd()]);
    assert_eq!(start(&mut peer), "SET_VRING_KICK: virtqueue 0: started without SET_VRING_NUM");
    peer.vring(Request::SetVringNum, 0, 100);
    assert_eq!(start(&mut peer), "SET_VRING_KICK: virtqueue 0: started without SET_VRING_ADDR");
    peer.tell_with(Request::SetVringAddr, Peer::address(0, 0).as_bytes(), Vec::new());
    assert!(start(&mut peer).ends_with("size 100, a split ring has a power of two"));
    peer.vring(Request::SetVringNum, 0, 64);
    peer.vring(Request::SetVringBase, 0, 0x1_0000);
    assert!(start(&mut peer).ends_with("base 0x10000, a split ring has 16 bits"));
    peer.remove_region(0, 0x10_0000, 0x7f00_0000_0000);
    assert!(start(&mut peer).ends_with("started without memory"));
    assert_eq!(peer.session.running(), 0);
}

#[test]
fn a_ring_that_could_not_start_may_be_started_again() {
    let mut peer = Peer::with_memory();
    peer.need_reply = true;
    peer.set_up(0, 8);
    peer.mock.refuse.insert("start");
    let payload = VringState { index: 0, num: 1 };
    let answer = peer.handle(Request::SetVringEnable, payload.as_bytes(), Vec::new()).unwrap();
    assert_eq!(answer.refused.as_deref(), Some("SET_VRING_ENABLE: not today"));
    assert_eq!(answer.reply.unwrap().payload(), 1u64.as_bytes());
    peer.mock.refuse.clear();
    peer.vring(Request::SetVringEnable, 0, 1);
    assert_eq!(peer.session.running(), 1);
}

#[test]
fn a_running_ring_keeps_size_base_and_place() {
    let mut peer = Peer::with_memory();
    peer.set_up(0, 8);
    peer.vring(Request::SetVringEnable, 0, 1);
    for request in [Request::SetVringNum, Request::SetVringBase] {
        let payload = VringState { index: 0, num: 8 };
        let why = peer.refused(request, payload.as_bytes(), Vec::new());
        assert_eq!(why, format!("{}: virtqueue 0 runs", request.name()));
    }
    let moved = VringAddress { used: 0x7f00_0000_8000, ..Peer::address(0, 0) };
    let why = peer.refused(Request::SetVringAddr, moved.as_bytes(), Vec::new());
    assert_eq!(why, "SET_VRING_ADDR: virtqueue 0 runs and cannot be moved");
    // Nor is there another area for its requests in flight, whichever side makes it.
    let area = Inflight { num_queues: 1, queue_size: 8, mmap_size: 4096, ..Inflight::default() };
    for (request, fds) in
        [(Request::GetInflightFd, vec![]), (Request::SetInflightFd, vec![eventfd()])]
    {
        let why = peer.refused(request, area.as_bytes(), fds);
        assert_eq!(why, format!("{}: virtqueues run", request.name()));
    }
}

#[test]
fn migration_turns_the_log_on_and_off_under_running_rings() {
    let mut peer = Peer::with_memory();
    peer.set_up(0, 8);
    peer.vring(Request::SetVringEnable, 0, 1);
    peer.mock.taken();
    let log = [0x1000_u64, 0];
    let reply = peer.done(Request::SetLogBase, log.as_bytes(), vec![eventfd()]);
    assert_eq!(reply.unwrap().payload(), log.as_bytes());
    peer.tell(Request::SetFeatures, SPLIT | features::F_LOG_ALL);
    peer.tell_with(Request::SetVringAddr, Peer::address(0, 1).as_bytes(), Vec::new());
    peer.tell(Request::SetFeatures, SPLIT);
    peer.tell_with(Request::SetVringAddr, Peer::address(0, 0).as_bytes(), Vec::new());
    assert_eq!(
        peer.mock.taken(),
        [
            "set_log 4096",
            "set_features 0x164007644",
            "log_ring 0 Some(3000)",
            "set_features 0x160007644",
            "log_ring 0 None"
        ]
    );
    let why = peer.refused(Request::SetFeatures, (SPLIT & !(1 << 29)).as_bytes(), Vec::new());
    assert_eq!(why, "SET_FEATURES: features 0x20000000 change while virtqueues run");
    assert_eq!(peer.session.running(), 1);
}

#[test]
fn a_ring_that_starts_while_the_log_is_on_is_logged() {
    let mut peer = Peer::with_memory();
    peer.set_up(0, 8);
    peer.tell_with(Request::SetVringAddr, Peer::address(0, 1).as_bytes(), Vec::new());
    peer.mock.taken();
    peer.vring(Request::SetVringEnable, 0, 1);
    assert_eq!(peer.mock.taken(), ["start 0 size 8 base 0x0 log 0x3000"]);
}

#[test]
fn call_and_error_eventfds_may_change_at_any_time() {
    let mut peer = Peer::with_memory();
    peer.vring_fd(Request::SetVringCall, 0);
    peer.set_up(0, 8);
    peer.vring(Request::SetVringEnable, 0, 1);
    peer.tell_with(Request::SetVringCall, 0x100u64.as_bytes(), Vec::new());
    peer.vring_fd(Request::SetVringErr, 0);
    assert_eq!(
        peer.mock.taken(),
        ["call 0 given", "start 0 size 8 base 0x0", "call 0 none", "err 0"]
    );
}

#[test]
fn memory_comes_and_goes_under_running_rings() {
    let mut peer = Peer::with_memory();
    peer.set_up(0, 8);
    peer.vring(Request::SetVringEnable, 0, 1);
    peer.mock.taken();
    peer.add_region(0x20_0000, 0x3b10, 0x7f10_0000_0000);
    peer.remove_region(0, 0x10_0000, 0x7f00_0000_0000);
    peer.add_region(0, 0x10_0000, 0x7f00_0000_0000);
    assert_eq!(
        peer.mock.taken(),
        ["add_region 0x200000+0x3b10", "remove_region 0x0", "add_region 0x0+0x100000"]
    );
    let region = Region { guest_addr: 0xf_ffff, size: 1, user_addr: 1, mmap_offset: 0 };
    let payload = SingleRegion { padding: 0, region };
    let why = peer.refused(Request::AddMemReg, payload.as_bytes(), vec![eventfd()]);
    assert!(why.contains("overlaps the one at 0x0"), "{why}");
}

#[test]
fn a_reset_keeps_memory_and_goes_back_to_the_beginning() {
    for by_status in [false, true] {
        let mut peer = Peer::with_memory();
        peer.set_up(0, 8);
        peer.vring(Request::SetVringEnable, 0, 1);
        peer.tell(Request::SetStatus, 7);
        peer.mock.broken = true;
        assert_eq!(peer.ask(Request::GetStatus), 0x47);
        peer.mock.taken();
        if by_status {
            peer.tell(Request::SetStatus, 0);
        } else {
            peer.tell_with(Request::ResetDevice, &[], Vec::new());
        }
        assert_eq!(peer.mock.taken(), ["stop 0", "reset"]);
        assert_eq!(peer.ask(Request::GetStatus), 0);
        assert_eq!(peer.session.features(), 0);
        peer.tell(Request::SetFeatures, SPLIT);
        peer.set_up(0, 8);
        peer.vring(Request::SetVringEnable, 0, 1);
        assert_eq!(peer.session.running(), 1);
    }
}

#[test]
fn where_a_ring_stood_can_be_asked_once_after_a_reset() {
    let mut peer = Peer::with_memory();
    peer.set_up(0, 8);
    peer.vring(Request::SetVringEnable, 0, 1);
    peer.tell(Request::SetStatus, 0);
    assert_eq!(peer.get_vring_base(0), 0x1000, "as QEMU 7.2 does when it stops a guest");
    assert_eq!(peer.get_vring_base(0), 0, "the ring begins again");
}

#[test]
fn the_end_stops_all_rings_even_if_one_cannot_complete() {
    let mut peer = Peer::with_memory();
    for index in 0..2 {
        peer.set_up(index, 8);
        peer.vring(Request::SetVringEnable, index, 1);
    }
    peer.mock.refuse.insert("stop");
    peer.mock.taken();
    peer.session.close(&mut peer.mock);
    assert_eq!(peer.mock.taken(), ["stop 0", "stop 1", "disconnect"]);
    assert_eq!(peer.session.running(), 0);
}

#[test]
fn an_answer_is_given_when_it_was_asked_for_and_negotiated() {
    let mut peer = Peer::new();
    peer.need_reply = true;
    assert!(peer.done(Request::SetOwner, &[], Vec::new()).is_none());
    let all = features::ALL.as_bytes();
    assert!(peer.done(Request::SetProtocolFeatures, all, Vec::new()).is_none());
    let reply = peer.done(Request::SetOwner, &[], Vec::new()).expect("an answer");
    let header = Header { request: 3, flags: 0b101, size: 8 };
    assert_eq!(reply.bytes()[..12], *header.as_bytes());
    assert_eq!(reply.payload(), [0; 8]);
    // One reply, not two, where there is one anyway.
    assert_eq!(peer.ask(Request::GetQueueNum), 64);
}

#[test]
fn configuration_space_is_read_at_any_length_and_from_both_bases() {
    let mut peer = Peer::negotiated();
    assert_eq!(peer.get_config(0, 57)[56], 56);
    assert_eq!(peer.get_config(0x100, 60)[59], 59);
    assert_eq!(peer.get_config(0, 96)[60..], [0; 36]);
    assert_eq!(peer.get_config(0, 4096).len(), 4096);
    assert_eq!(peer.get_config(8, 4), [8, 9, 10, 11]);
    let head = [0u32, 4, 0];
    let reply = peer.done(Request::GetConfig, head.as_bytes(), Vec::new()).unwrap();
    assert_eq!(reply.payload()[12..], [0, 1, 2, 3]);
}

#[test]
fn a_refused_write_to_configuration_space_ends_nothing() {
    let mut peer = Peer::negotiated();
    peer.mock.refuse.insert("set_config");
    let mut payload = [32u32, 1, 0].as_bytes().to_vec();
    payload.push(1);
    let answer = peer.handle(Request::SetConfig, &payload, Vec::new()).unwrap();
    assert!(answer.reply.is_none() && answer.refused.is_some());
    peer.need_reply = true;
    let answer = peer.handle(Request::SetConfig, &payload, Vec::new()).unwrap();
    assert_eq!(answer.reply.unwrap().payload(), 1u64.as_bytes());
}

#[test]
fn refusals_with_a_reply_of_their_own_use_it() {
    let mut peer = Peer::negotiated();
    peer.mock.refuse.extend(["get_config", "get_inflight", "device_state", "check_device_state"]);
    let mut reply = |request, payload: &[u8], fds| {
        let answer = peer.handle(request, payload, fds).unwrap();
        assert!(answer.refused.is_some());
        answer.reply.unwrap().payload().to_vec()
    };
    assert_eq!(reply(Request::GetConfig, [0u32, 4, 0].as_bytes(), Vec::new()), [0; 0]);
    let asked = Inflight { num_queues: 1, queue_size: 8, ..Inflight::default() };
    assert_eq!(reply(Request::GetInflightFd, asked.as_bytes(), Vec::new()), [0; 24]);
    let state = reply(Request::SetDeviceStateFd, &[0; 8], vec![eventfd()]);
    assert_eq!(state, 0x101u64.as_bytes());
    assert_eq!(reply(Request::CheckDeviceState, &[], Vec::new()), 1u64.as_bytes());
}

#[test]
fn a_log_at_the_end_of_the_addresses_is_refused() {
    let mut peer = Peer::with_memory();
    peer.set_up(0, 8);
    for log in [u64::MAX, u64::MAX - 6 - 8 * 1024] {
        let address = VringAddress { log, ..Peer::address(0, 1) };
        let why = peer.refused(Request::SetVringAddr, address.as_bytes(), Vec::new());
        let there =
            format!("the log of a used ring at {log:#x} runs over the end of the addresses");
        assert_eq!(why, format!("SET_VRING_ADDR: {there}"));
        // Without the flag the number says nothing.
        let address = VringAddress { log, ..Peer::address(0, 0) };
        peer.tell_with(Request::SetVringAddr, address.as_bytes(), Vec::new());
    }
}
