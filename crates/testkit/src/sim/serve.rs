//! The simulated storage as the code under test sees it.
//!
//! Promises: operations take effect one at a time, and end in the order that the rules say. A
//! future that is dropped may have its effect all the same, as with a kernel.

use std::future::poll_fn;
use std::task::Poll;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::{
    Allocation, CustomStorage, Errno, Kind, Limits, LocalFuture, Preallocation,
};

use super::SimStorage;
use super::operation::{Action, OpKind, Outcome};
use super::rules::{self, Fault};
use super::state::Wait;

/// Forgets a waiting operation when its future is dropped.
struct Waiting<'a> {
    sim: &'a SimStorage,
    number: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.sim.state().abandon(self.number);
    }
}

impl SimStorage {
    /// One operation, with its fault.
    async fn run(
        &self,
        ring: &Ring,
        kind: OpKind,
        offset: u64,
        len: u64,
        make: impl FnOnce(&super::state::State, u64) -> Action,
    ) -> Result<Outcome, Errno> {
        let (record, action, fault) = {
            let mut state = self.state();
            let record = state.begin(kind, offset, len);
            if !state.is_powered() {
                return Err(Errno::IO);
            }
            let state = &mut *state;
            let fault =
                rules::choose(&mut state.rules, &mut state.prng, record.number, kind, offset, len);
            let moved = match fault {
                Some(Fault::Short(most) | Fault::FailAfter(most, _)) => len.min(most),
                _ => len,
            };
            (record, make(state, moved), fault)
        };
        let wait = match fault {
            None | Some(Fault::Short(_)) => return self.state().perform(&action),
            Some(Fault::Fail(errno)) => return Err(errno),
            Some(Fault::Lie) => {
                // What was asked for, as far as the caller can see at once.
                return match action {
                    Action::Write { ref bytes, .. } => Ok(Outcome::Count(bytes.len())),
                    Action::Read { .. } | Action::Allocation { .. } => {
                        self.state().perform(&action)
                    }
                    _ => Ok(Outcome::Done),
                };
            }
            Some(Fault::FailAfter(_, errno)) => {
                if kind == OpKind::Write {
                    self.state().perform(&action)?;
                }
                return Err(errno);
            }
            Some(Fault::Delay(_) | Fault::DelayBetween(..)) => Wait::Timer,
            Some(Fault::Hold) => Wait::Released,
            Some(Fault::Hang) => Wait::Forever,
        };
        self.state().park(record, action.clone(), wait);
        let waiting = Waiting { sim: self, number: record.number };
        if let Some(Fault::Delay(time)) = fault {
            ring.sleep(time).await;
            drop(waiting);
            return self.state().perform(&action);
        }
        poll_fn(|cx| {
            self.state().poll(record.number, cx.waker()).map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

impl SimStorage {
    /// A read that no rule can concern, straight into the buffer: most reads of a crash state.
    fn read_at_once(&self, offset: u64, buf: &IoBuf) -> Option<usize> {
        let mut state = self.state();
        if !state.rules.is_empty() || !state.is_powered() {
            return None;
        }
        state.begin(OpKind::Read, offset, buf.len() as u64);
        let len = buf.len() as u64;
        Some(state.image.visit(offset, len, |at, piece| buf.copy_from_slice(at, piece)))
    }
}

/// For operations that only succeed or fail.
fn done(_: Outcome) {}

impl CustomStorage for SimStorage {
    fn name(&self) -> &'static str {
        "simulated storage"
    }

    fn len(&self) -> u64 {
        self.state().image.len()
    }

    fn is_read_only(&self) -> bool {
        self.state().read_only
    }

    fn kind(&self) -> Kind {
        self.state().kind
    }

    fn limits(&self) -> Limits {
        self.state().limits
    }

    fn allocated_bytes(&self) -> u64 {
        let state = self.state();
        // st_blocks of a device is 0.
        if state.kind == Kind::BlockDevice { 0 } else { state.image.allocated_bytes() }
    }

    fn read<'a>(&'a self, ring: &'a Ring, offset: u64, buf: &'a IoBuf) -> LocalFuture<'a, usize> {
        Box::pin(async move {
            let make = |_: &_, len| Action::Read { offset, len };
            if let Some(count) = self.read_at_once(offset, buf) {
                return Ok(count);
            }
            match self.run(ring, OpKind::Read, offset, buf.len() as u64, make).await? {
                Outcome::Bytes(bytes) => {
                    buf.copy_from_slice(0, &bytes);
                    Ok(bytes.len())
                }
                _ => Ok(0),
            }
        })
    }

    fn write<'a>(&'a self, ring: &'a Ring, offset: u64, buf: &'a IoBuf) -> LocalFuture<'a, usize> {
        Box::pin(async move {
            let make = |_: &_, len| {
                let mut bytes = buf.to_vec();
                bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
                Action::Write { offset, bytes: bytes.into() }
            };
            match self.run(ring, OpKind::Write, offset, buf.len() as u64, make).await? {
                Outcome::Count(count) => Ok(count),
                _ => Ok(0),
            }
        })
    }

    fn flush<'a>(&'a self, ring: &'a Ring) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            let make = |state: &super::state::State, _| state.flush_action();
            self.run(ring, OpKind::Flush, 0, 0, make).await.map(done)
        })
    }

    fn discard<'a>(&'a self, ring: &'a Ring, offset: u64, len: u64) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            let make =
                |_: &_, _| Action::Zero { offset, len, unmap: true, grow: false, discards: true };
            self.run(ring, OpKind::Discard, offset, len, make).await.map(done)
        })
    }

    fn write_zeroes<'a>(
        &'a self,
        ring: &'a Ring,
        offset: u64,
        len: u64,
        may_unmap: bool,
        fallback: bool,
    ) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            if !fallback && self.state().refuses_holes {
                return Err(Errno::OPNOTSUPP);
            }
            let make = |_: &_, _| Action::Zero {
                offset,
                len,
                unmap: may_unmap,
                grow: true,
                discards: false,
            };
            self.run(ring, OpKind::WriteZeroes, offset, len, make).await.map(done)
        })
    }

    fn set_len<'a>(&'a self, ring: &'a Ring, len: u64) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            let make = |_: &_, _| Action::SetLen(len);
            self.run(ring, OpKind::SetLen, len, 0, make).await.map(done)
        })
    }

    fn preallocate<'a>(
        &'a self,
        ring: &'a Ring,
        offset: u64,
        len: u64,
        mode: Preallocation,
    ) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            let make = |_: &_, _| Action::Preallocate { offset, len, mode };
            self.run(ring, OpKind::Preallocate, offset, len, make).await.map(done)
        })
    }

    fn allocation<'a>(
        &'a self,
        ring: &'a Ring,
        offset: u64,
        len: u64,
    ) -> LocalFuture<'a, (Allocation, u64)> {
        Box::pin(async move {
            let make = |_: &_, _| Action::Allocation { offset, len };
            match self.run(ring, OpKind::Allocation, offset, len, make).await? {
                Outcome::Run(kind, run) => Ok((kind, run)),
                _ => Err(Errno::IO),
            }
        })
    }
}
