//! The task that sends: all replies that are finished leave in one system call.
//!
//! Promises: replies stay whole and in the order in which they were finished; while a batch is on
//! its way the next one gathers. Allocates nothing once it has sent the largest batch.

use std::rc::Rc;

use ringdisk_ring::{IoBuf, Scatter};

use super::slot::RUNS_MAX;
use super::{REQUESTS_MAX, Session};

/// Parts of replies in a batch at most: the kernel takes 1024 in one call.
const PARTS_MAX: usize = 1024;

/// Sends replies until the session closes.
pub(super) async fn send(session: Rc<Session>) {
    let mut batch: Vec<usize> = Vec::with_capacity(REQUESTS_MAX);
    let mut parts: Vec<IoBuf> = Vec::with_capacity(PARTS_MAX + RUNS_MAX + 1);
    let mut scatter = Scatter::with_capacity(PARTS_MAX + RUNS_MAX + 1);
    loop {
        let has_more = gather(&session, &mut batch, &mut parts);
        if !session.is_broken.get()
            && let Err(end) = session.transport.write_all(&parts, &mut scatter).await
        {
            let why = end.text().unwrap_or_default();
            tracing::debug!("replies cannot be sent: {why}");
            session.is_broken.set(true);
        }
        scatter.clear();
        parts.clear();
        batch.drain(..).for_each(|number| session.release(number));
        if has_more {
            continue;
        }
        if session.is_closing.get() {
            return;
        }
        session.to_send.park(session.ring()).await;
    }
}

/// Takes replies that are finished. Gives whether there are more.
fn gather(session: &Session, batch: &mut Vec<usize>, parts: &mut Vec<IoBuf>) -> bool {
    let (mut finished, slots) = (session.finished.borrow_mut(), session.slots.borrow());
    let mut taken = 0;
    for number in finished.iter() {
        if parts.len() >= PARTS_MAX - RUNS_MAX {
            break;
        }
        let slot = &slots[*number];
        let memory = slot.memory();
        let reply = slot.reply.borrow();
        parts.extend(reply.iter().map(|(start, end)| memory.slice(*start..*end)));
        taken += 1;
    }
    batch.extend(finished.drain(..taken));
    !finished.is_empty()
}
