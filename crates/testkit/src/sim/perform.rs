//! Lets an operation take effect.
//!
//! Promises: what a block device does in another way than a file is in `device`.

use ringdisk_storage::{Allocation, Errno, Kind, Preallocation};

use super::device;
use super::operation::{Action, Change, Outcome};
use super::state::State;

impl State {
    /// Lets an operation take effect.
    pub(crate) fn perform(&mut self, action: &Action) -> Result<Outcome, Errno> {
        if !self.powered {
            return Err(Errno::IO);
        }
        let changes = !matches!(
            action,
            Action::Read { .. } | Action::Flush { .. } | Action::Allocation { .. }
        );
        if changes && self.read_only {
            return Err(Errno::ROFS);
        }
        if self.kind == Kind::BlockDevice
            && let Some(outcome) = device::perform(self, action)
        {
            return outcome;
        }
        match *action {
            Action::Read { offset, len } => {
                return Ok(Outcome::Bytes(self.image.read(offset, len)));
            }
            Action::Write { offset, ref bytes } => {
                let count = bytes.len();
                self.change(Change::Write { offset, bytes: bytes.clone() });
                return Ok(Outcome::Count(count));
            }
            Action::Flush { before } => self.flush(before),
            Action::Zero { offset, len, unmap, grow, .. } => {
                if grow && offset + len > self.image.len() {
                    self.change(Change::SetLen(offset + len));
                }
                self.change(Change::Zero { offset, len, unmap });
            }
            Action::SetLen(len) => self.change(Change::SetLen(len)),
            Action::Preallocate { offset, len, mode } => {
                if mode == Preallocation::Full && offset < self.image.len() {
                    return Err(Errno::INVAL);
                }
                if mode != Preallocation::Off {
                    self.change(Change::Reserve { offset, len });
                } else if offset + len > self.image.len() {
                    self.change(Change::SetLen(offset + len));
                }
            }
            Action::Allocation { offset, len } => {
                let end = offset.saturating_add(len).min(self.image.len());
                if offset >= end {
                    return Ok(Outcome::Run(Allocation::Hole, 0));
                }
                let (exists, stop) = self.image.run(offset);
                let kind = if exists { Allocation::Data } else { Allocation::Hole };
                return Ok(Outcome::Run(kind, stop.min(end) - offset));
            }
        }
        Ok(Outcome::Done)
    }
}
