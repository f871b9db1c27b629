//! COMMIT_AND_FETCH: what is refused, and replies that do not fit. The server is told about the
//! first only.

use ringdisk_ring::Errno;

use crate::kernel_orders::entry::Reply;
use crate::kernel_orders::serve::Got;
use crate::kernel_orders::wire::{Wire, possible_cpus};

#[test]
fn a_queue_or_a_request_that_is_not_there_is_refused_and_harms_nothing() {
    let Some(mut wire) = Wire::live(1) else { return };
    let wrong = [
        (possible_cpus(), 1, Errno::INVAL),
        (u16::MAX, 1, Errno::INVAL),
        (0, u64::MAX - 1, Errno::NOENT),
        (0, 0, Errno::NOENT),
    ];
    for (queue, commit_id, errno) in wrong {
        let command = wire.commit_command(queue, commit_id);
        assert_eq!(wire.result(command), Err(errno), "{queue} {commit_id}");
    }
    let (got, _, by_entry) = wire.serve_client(4096);
    assert!(got.is_ok() && by_entry > 0, "{got:?}");
}

#[test]
fn a_queue_that_was_never_made_has_no_connection() {
    let Some(mut wire) = Wire::negotiated() else { return };
    let entry = wire.new_entry();
    wire.register(0, entry);
    let command = wire.commit_command(possible_cpus() - 1, 1);
    assert_eq!(wire.result(command), Err(Errno::NOTCONN));
}

#[test]
fn a_request_can_be_committed_once() {
    let Some(mut wire) = Wire::live(2) else { return };
    let client = wire.client(4096);
    let index = wire.hold_a_read();
    let (queue, id) = (wire.entries[index].queue, wire.entries[index].commit_id());
    wire.serve_entry(index);
    let again = wire.commit_command(queue, id);
    assert_eq!(wire.result(again), Err(Errno::NOENT));
    assert!(wire.finish(&client).is_ok());
}

/// Serves a client, whose READ gets the reply that `spoil` makes of the right one.
fn read_with(spoil: impl Fn(&mut Reply)) -> Option<(Got, Wire)> {
    let mut wire = Wire::live(1)?;
    let client = wire.client(4096);
    let index = wire.hold_a_read();
    let entry = wire.entries[index].clone();
    let mut reply = wire.answer(&entry.request(), &entry.payload());
    spoil(&mut reply);
    entry.put(&reply);
    wire.commit_entry(index);
    let got = wire.finish(&client);
    Some((got, wire))
}

fn refused_to_the_client_only(errno: Errno, spoil: impl Fn(&mut Reply)) {
    let Some((got, mut wire)) = read_with(spoil) else { return };
    let got = got.map_err(|error| error.raw_os_error());
    assert_eq!(got, Err(Some(errno.raw_os_error())));
    wire.settle();
    for index in 0..wire.entries.len() {
        let sent = wire.entries[index].sent.clone();
        assert!(wire.pends(&sent), "the server is not told: {:?}", sent.get());
    }
    assert!(wire.serve_client(4096).0.is_ok());
}

#[test]
fn more_data_than_was_asked_for() {
    refused_to_the_client_only(Errno::INVAL, |reply| reply.payload_len = 8192);
}

#[test]
fn an_error_number_that_is_none() {
    for number in [5, -512, i32::MIN] {
        let spoil = |reply: &mut Reply| reply.header[4..8].copy_from_slice(&number.to_ne_bytes());
        refused_to_the_client_only(Errno::INVAL, spoil);
    }
}

/// What names no request is how notifications travel on `/dev/fuse`; they do not travel in rings.
#[test]
fn a_reply_to_nobody_or_to_another_request() {
    refused_to_the_client_only(Errno::INVAL, |reply| reply.header[8..16].fill(0));
    refused_to_the_client_only(Errno::NOENT, |reply| reply.header[8] ^= 2);
}

#[test]
fn an_error_reaches_the_client_as_it_is() {
    let spoil = |reply: &mut Reply| {
        reply.header[4..8].copy_from_slice(&(-Errno::NOSPC.raw_os_error()).to_ne_bytes());
    };
    let Some((got, _wire)) = read_with(spoil) else { return };
    let errno = got.map_err(|error| error.raw_os_error());
    assert_eq!(errno, Err(Some(Errno::NOSPC.raw_os_error())));
}
