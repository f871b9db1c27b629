//! Sends requests in batches.
//!
//! Promises: one write is in flight for a connection; what is queued meanwhile goes with the next
//! one. Heads and short payloads are copied into one buffer, long payloads are sent from where they
//! are. Nothing is allocated for a request.

use std::future::poll_fn;
use std::task::Poll;

use ringdisk_nbd_protocol::request::{EXTENDED_BYTES, Style};
use ringdisk_ring::{Errno, IoBuf};
use ringdisk_tls::StreamError;

use super::buffers::{BATCH_BYTES, DIRECT_MAX};
use super::driver::Driver;
use super::link::Link;
use super::lost::Lost;

/// Payloads up to this length are copied: a copy of 16 KiB costs as much as a piece more of the
/// vector.
const COPIED_MAX: usize = 16 << 10;
impl Driver {
    /// Sends what is queued, for as long as the link is there.
    pub(super) async fn send_all(&self, link: &Link) -> Lost {
        loop {
            let batch = poll_fn(|_| match self.next_batch(link.agreed.style) {
                Some(batch) => Poll::Ready(batch),
                None => Poll::Pending,
            })
            .await;
            self.is_sending.set(true);
            let sent = self.send(link, &batch).await;
            drop(batch);
            self.is_sending.set(false);
            if let Err(lost) = sent {
                return lost;
            }
        }
    }

    async fn send(&self, link: &Link, batch: &IoBuf) -> Result<(), Lost> {
        let mut done = 0;
        while done < batch.len() {
            let rest = if done == 0 { batch.clone() } else { batch.slice(done..batch.len()) };
            match link.write(&self.ring, &rest).await {
                Ok(0) => return Err(Lost::Ended),
                Ok(count) => done += count,
                Err(StreamError::Socket(Errno::INTR | Errno::AGAIN)) => self.ring.yield_now().await,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Gathers the requests that are queued, as far as they fit. `None`: there are none.
    fn next_batch(&self, style: Style) -> Option<IoBuf> {
        let mut slots = self.slots.borrow_mut();
        if !slots.has_queued() || !self.may_send() {
            return None;
        }
        self.is_first_batch.set(false);
        let output = &mut *self.output.borrow_mut();
        output.pieces.clear();
        let (mut from, mut to, mut direct) = (0, 0, 0);
        // A head and the longest payload that is copied always fit.
        while direct < DIRECT_MAX && to + EXTENDED_BYTES + COPIED_MAX <= BATCH_BYTES {
            let Some((request, payload)) = slots.send_next() else { break };
            match style {
                Style::Simple | Style::Structured => {
                    let head = request.to_compact();
                    output.heads.copy_from_slice(to, &head);
                    to += head.len();
                }
                Style::Extended => {
                    let head = request.to_extended();
                    output.heads.copy_from_slice(to, &head);
                    to += head.len();
                }
            }
            match payload {
                Some(payload) if payload.len() <= COPIED_MAX => {
                    output.heads.copy_from_buf(to, &payload);
                    to += payload.len();
                }
                Some(payload) => {
                    output.pieces.push(output.heads.slice(from..to));
                    output.pieces.push(payload);
                    (from, direct) = (to, direct + 1);
                }
                None => {}
            }
        }
        if from == 0 {
            return Some(output.heads.slice(0..to));
        }
        if from < to {
            output.pieces.push(output.heads.slice(from..to));
        }
        Some(output.pieces.buffer())
    }
}
