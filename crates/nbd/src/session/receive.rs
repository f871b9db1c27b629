//! The task that receives: takes all requests that are there, and reads again.
//!
//! Promises: a request is handed to its slot when all of it is there; the payload of a large write
//! is read straight into the memory of its slot. Nothing is read while no slot is free, so a client
//! that takes no replies stalls here, alone; one that has gone has nothing more carried out.

use std::rc::Rc;
use std::time::Instant;

use ringdisk_nbd_protocol::numbers::{command, errno};
use ringdisk_nbd_protocol::request::{EXTENDED_BYTES, Request, WrongMagic};
use ringdisk_ring::{Errno, IoBuf};

use super::slot::Slot;
use super::validate::{self, Refusal, Rules};
use super::{SMALL_BYTES, Session};
use crate::end_reason::End;
use crate::input_buffer::Input;

/// A payload of which so much is missing is read straight into the memory of its slot; a smaller
/// rest comes with the next requests, in one read.
const STRAIGHT_BYTES_MIN: usize = 64 << 10;

/// Receives requests until the end of the connection.
pub(super) async fn receive(session: &Rc<Session>, input: &mut Input) -> Result<(), End> {
    let head_bytes = session.style.request_bytes();
    loop {
        let mut taken = false;
        while input.len() >= head_bytes {
            if session.is_broken.get() {
                // Nobody hears of what was asked for and not begun.
                return Err(End::Socket(Errno::PIPE));
            }
            if session.transport.stands_still() {
                return Err(End::StandsStill);
            }
            let mut head = [0; EXTENDED_BYTES];
            input.peek(&mut head[..head_bytes]);
            let request = match Request::parse(session.style, &head[..head_bytes]) {
                Ok(request) => request,
                Err(wrong) => {
                    refuse_magic(session, wrong).await;
                    return Err(End::Protocol("bad magic number of a request"));
                }
            };
            if request.command == command::DISCONNECT {
                return Ok(());
            }
            if !take(session, input, request, &head[..head_bytes]).await? {
                break;
            }
            taken = true;
        }
        if taken {
            // The tasks of the slots, and the one that sends, queue what they have before the next
            // read: one system call for all.
            session.ring().yield_now().await;
        }
        input.read().await?;
    }
}

/// Takes the request at the front, and hands it to a slot. `false`: a part of a small payload is
/// not there yet.
async fn take(
    session: &Rc<Session>,
    input: &mut Input,
    request: Request,
    head: &[u8],
) -> Result<bool, End> {
    let head_bytes = head.len();
    let payload = validate::payload_bytes(&request, session.style);
    let judged = judge(session, &request);
    if validate::ends_the_connection(payload) {
        let refusal = judged.err().unwrap_or_else(|| Refusal::new(errno::EINVAL, "payload"));
        refuse(session, &request, refusal).await;
        return Err(End::Protocol("a payload of more than 32 MiB"));
    }
    if let Err(refusal) = judged {
        input.skip(head_bytes);
        session.transport.to_the_end(input.discard(payload)).await?;
        refuse(session, &request, refusal).await;
        return Ok(true);
    }
    // Not above 32 MiB.
    let payload = usize::try_from(payload).unwrap_or(usize::MAX);
    let missing = (head_bytes + payload).saturating_sub(input.len());
    if missing > 0 && payload < STRAIGHT_BYTES_MIN {
        return Ok(false);
    }
    let slot = session.slot(data_bytes(&request, payload)).await;
    if session.transport.stands_still() {
        abandon(session, &slot);
        return Err(End::StandsStill);
    }
    input.skip(head_bytes);
    if payload > 0 {
        let data = slot.data(payload);
        let mut here = input.move_to(&data);
        if let Err(end) = input.read_into(&data, &mut here).await {
            if end == End::StandsStill {
                put_back(session, head, &data.slice(0..here));
            }
            abandon(session, &slot);
            return Err(end);
        }
    }
    if session.transport.stands_still() {
        // All of it is there, and it is begun by the process that goes on.
        put_back(session, head, &slot.data(payload));
        abandon(session, &slot);
        return Err(End::StandsStill);
    }
    if session.queue.is_ending.get() || session.export.is_leaving() {
        session.refuse(&slot, &request, &Refusal::new(errno::ESHUTDOWN, "the server ends"));
        return Ok(true);
    }
    slot.begun.set(Some(Instant::now()));
    session.queue.admission.begin(session.ring());
    session.queue.cells.begin();
    slot.request.set(Some(request));
    slot.work.unpark(session.ring());
    Ok(true)
}

fn judge(session: &Session, request: &Request) -> Result<(), Refusal> {
    let export = &session.export;
    let rules = Rules {
        style: session.style,
        size: export.disk.size().0,
        is_read_only: export.is_read_only,
        has_contexts: !session.contexts.is_empty(),
    };
    validate::judge(request, &rules)
}

/// Memory for data that a request takes, bytes.
fn data_bytes(request: &Request, payload: usize) -> usize {
    match request.command {
        // Not above 32 MiB, as it was judged.
        command::READ => usize::try_from(request.len).unwrap_or(usize::MAX),
        command::CACHE => SMALL_BYTES,
        _ => payload,
    }
}

/// A request of which so much is there is received again, here or by a successor. Nothing was read
/// after it: its payload was read straight into a slot.
fn put_back(session: &Session, head: &[u8], payload: &IoBuf) {
    let mut bytes = vec![0; head.len() + payload.len()];
    let (first, rest) = bytes.split_at_mut(head.len());
    first.copy_from_slice(head);
    payload.copy_to_slice(0, rest);
    session.transport.put_back(bytes);
}

/// The slot was taken for a request that never came whole.
fn abandon(session: &Session, slot: &Slot) {
    session.queue.unsent.set(session.queue.unsent.get() + 1);
    session.release(slot.number);
}

/// Answers a request with an error.
async fn refuse(session: &Rc<Session>, request: &Request, refusal: Refusal) {
    let slot = session.slot(0).await;
    session.refuse(&slot, request, &refusal);
}

async fn refuse_magic(session: &Rc<Session>, wrong: WrongMagic) {
    let WrongMagic { got, expected } = wrong;
    let text = format!("invalid magic (got 0x{got:x}, expected 0x{expected:x})");
    refuse(session, &Request::default(), Refusal::new(errno::EINVAL, text)).await;
}
