//! What a block device does in another way than a file: its length is fixed, it has no holes, what
//! nobody has written since it became ours is old bytes, and a discard leaves whatever the device
//! likes.
//!
//! Promises: those of `ringdisk_storage::Storage`, which keeps them for devices of the kernel.

use std::sync::Arc;

use ringdisk_storage::{Allocation, Errno};

use super::image::STALE;
use super::operation::{Action, Change, Outcome};
use super::state::State;

/// Larger ranges are never filled with other bytes by a discard: a test that discards all of a
/// large device stays cheap.
const FILLED_MAX: u64 = 1 << 20;

/// Lets an operation take effect on a block device. `None`: it is as on a file.
pub(super) fn perform(state: &mut State, action: &Action) -> Option<Result<Outcome, Errno>> {
    let len = state.image.len();
    match *action {
        Action::Write { offset, ref bytes } => Some(write(state, offset, bytes)),
        Action::Zero { offset, len: count, discards: true, .. } => {
            discard(state, offset, count.min(len.saturating_sub(offset)));
            Some(Ok(Outcome::Done))
        }
        Action::Zero { offset, len: count, .. } if offset + count > len => Some(Err(Errno::NOSPC)),
        Action::SetLen(wanted) if wanted == len => Some(Ok(Outcome::Done)),
        Action::SetLen(_) => Some(Err(Errno::OPNOTSUPP)),
        // All its bytes exist.
        Action::Preallocate { offset, len: count, .. } if offset + count > len => {
            Some(Err(Errno::NOSPC))
        }
        Action::Preallocate { .. } => Some(Ok(Outcome::Done)),
        Action::Allocation { offset, .. } if offset >= len => {
            Some(Ok(Outcome::Run(Allocation::Hole, 0)))
        }
        Action::Allocation { offset, len: count } => {
            Some(Ok(Outcome::Run(Allocation::Data, count.min(len - offset))))
        }
        Action::Read { .. } | Action::Flush { .. } | Action::Zero { .. } => None,
    }
}

/// What fits is written; what begins at the end is refused.
fn write(state: &mut State, offset: u64, bytes: &Arc<[u8]>) -> Result<Outcome, Errno> {
    let room = state.image.len().saturating_sub(offset).min(bytes.len() as u64);
    if room == 0 && !bytes.is_empty() {
        return Err(Errno::NOSPC);
    }
    let count = usize::try_from(room).unwrap_or(usize::MAX);
    let bytes = if count < bytes.len() { bytes[..count].into() } else { bytes.clone() };
    state.change(Change::Write { offset, bytes });
    Ok(Outcome::Count(count))
}

/// The old bytes stay, or there are zeroes, or bytes of others: the seed decides.
fn discard(state: &mut State, offset: u64, len: u64) {
    match state.prng.below(3) {
        _ if len == 0 => {}
        0 => {}
        1 if len <= FILLED_MAX => {
            let bytes = vec![STALE; usize::try_from(len).unwrap_or(0)].into();
            state.change(Change::Write { offset, bytes });
        }
        _ => state.change(Change::Zero { offset, len, unmap: true }),
    }
}
