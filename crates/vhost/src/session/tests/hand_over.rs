//! A session that goes on elsewhere.

use super::*;

/// A ring that runs, one that is disabled, one that was only sized.
fn busy() -> Peer {
    let mut peer = Peer::with_memory();
    peer.set_up(0, 8);
    peer.vring(Request::SetVringEnable, 0, 1);
    peer.set_up(1, 16);
    peer.vring(Request::SetVringNum, 2, 32);
    peer.tell(Request::SetStatus, 0xf);
    peer.mock.taken();
    peer
}

/// What another process gets of a session whose rings have been stopped.
fn taken(session: &Session) -> SessionState {
    let mut state = session.state();
    for (index, kick) in session.kicks() {
        state.vrings[usize::from(index)].kick = Some(kick.try_clone_to_owned().unwrap());
    }
    state.vrings.iter_mut().for_each(|vring| vring.resumes = true);
    state
}

#[test]
fn a_ring_that_could_not_run_is_not_run_by_the_next_process() {
    let old = busy();
    let mut state = taken(&old.session);
    state.vrings[0].resumes = false;
    let mut new = Peer::with_memory();
    new.session = Session::restore(config(), state).unwrap();
    new.session.resume(&mut new.mock).unwrap();
    assert_eq!(new.session.running(), 0);
    new.vring(Request::SetVringEnable, 0, 1);
    assert_eq!(new.session.running(), 1, "until the front end says it again");
}

#[test]
fn rings_go_on_where_they_were() {
    let mut old = busy();
    old.session.suspend(&mut old.mock);
    assert_eq!(old.mock.taken(), ["stop 0"]);
    let state = taken(&old.session);
    let mut new = Peer::with_memory();
    new.session = Session::restore(config(), state).unwrap();
    new.session.resume(&mut new.mock).unwrap();
    let features = format!("set_features {SPLIT:#x}");
    assert_eq!(new.mock.taken(), [&features, "set_status 15", "start 0 size 8 base 0x1000"]);
    new.vring(Request::SetVringEnable, 1, 1);
    assert_eq!(new.mock.taken(), ["start 1 size 16 base 0x0"]);
    assert_eq!(new.ask(Request::GetStatus), 0xf);
    new.remove_region(0, 0x10_0000, 0x7f00_0000_0000);
}

#[test]
fn the_old_process_goes_on_if_the_new_one_fails() {
    let mut old = busy();
    old.session.suspend(&mut old.mock);
    old.session.resume(&mut old.mock).unwrap();
    assert_eq!(old.session.running(), 1);
    assert_eq!(old.get_vring_base(0), 0x1000);
}

#[test]
fn a_ring_without_its_memory_waits_on_either_side() {
    let mut old = busy();
    old.remove_region(0, 0x10_0000, 0x7f00_0000_0000);
    old.session.suspend(&mut old.mock);
    let state = taken(&old.session);
    let mut new = Peer::negotiated();
    new.session = Session::restore(config(), state).unwrap();
    for peer in [&mut new, &mut old] {
        peer.mock.taken();
        peer.session.resume(&mut peer.mock).unwrap();
        assert_eq!(peer.mock.taken().last().unwrap(), "wait 0 base 0x1000");
        assert_eq!(peer.session.running(), 1);
        peer.add_region(0, 0x10_0000, 0x7f00_0000_0000);
        assert_eq!(peer.get_vring_base(0), 0x1000);
    }
}

#[test]
fn where_a_reset_stopped_a_ring_is_still_known() {
    let mut old = busy();
    old.tell(Request::SetStatus, 0);
    old.session.suspend(&mut old.mock);
    let state = taken(&old.session);
    let mut new = Peer::with_memory();
    new.session = Session::restore(config(), state).unwrap();
    new.session.resume(&mut new.mock).unwrap();
    assert_eq!(new.get_vring_base(0), 0x1000);
    assert_eq!(new.get_vring_base(0), 0, "once");
}

#[test]
fn what_is_not_offered_any_more_is_named() {
    let mut old = busy();
    old.session.suspend(&mut old.mock);
    for (lesser, what) in [
        (SessionConfig { features: 0, ..config() }, "are not offered any more"),
        (SessionConfig { protocol_features: 0, ..config() }, "are not offered any more"),
        (SessionConfig { queues_max: 4, ..config() }, "more virtqueues"),
        (SessionConfig { queue_size_max: 16, ..config() }, "a virtqueue of Some(32) entries"),
    ] {
        let error = Session::restore(lesser, taken(&old.session)).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
}
