//! A checkpoint that is running while the disk is changed.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::{Errno, IoBuf, Ring};

use super::world::{Cell, Change, Victim, World};
use crate::tests::read_steps;
use crate::{Checkpoint, CheckpointEnd, CheckpointOptions, CheckpointState, Disk};

/// The checkpoint, and what it must show.
pub(super) struct Frozen {
    checkpoint: Arc<Checkpoint>,
    bytes: Vec<u8>,
}

impl Frozen {
    /// Makes the checkpoint of a cell that has one.
    ///
    /// * `bytes`: what the disk shows.
    pub(super) async fn new(
        ring: &Ring,
        world: &World,
        disk: &Disk,
        bytes: &[u8],
        cell: Cell,
    ) -> Option<Frozen> {
        if !cell.is_frozen {
            return None;
        }
        let file = world.victim(Victim::Fleece).storage();
        let options = CheckpointOptions {
            copy_limit: Duration::from_secs(600),
            ..CheckpointOptions::new(file, Bytes(1 << 30))
        };
        let prepared = disk.prepare_checkpoint(ring, options).await.expect("prepared");
        let mut held = disk.hold(ring, Duration::from_secs(60)).await.expect("held");
        let checkpoint = held.freeze(&prepared).expect("frozen");
        Some(Frozen { checkpoint, bytes: bytes.to_vec() })
    }

    /// After the change: the state is what it was, or it is lost, for a reason.
    ///
    /// * `reached`: an operation failed, or was held.
    pub(super) async fn judge(self, ring: &Ring, disk: &Disk, cell: Cell, reached: bool) {
        let frozen = self.checkpoint.disk();
        let first = frozen.read(ring, 0, &IoBuf::new(512, 512)).await;
        let is_alive = disk.read(ring, 0, &IoBuf::new(512, 512)).await.is_ok();
        match self.checkpoint.state() {
            CheckpointState::Running if is_alive => {
                let shown = read_steps(ring, frozen, 100_000).await;
                let differs = shown.iter().zip(&self.bytes).position(|(a, b)| a != b);
                assert_eq!((shown.len(), differs), (self.bytes.len(), None), "{cell:?}");
            }
            CheckpointState::Running => {}
            CheckpointState::Failed(reason) => {
                assert!(reached && first == Err(Errno::IO), "{reason}, {cell:?}");
            }
            CheckpointState::Ended => {
                assert!(cell.change == Change::Close && first == Err(Errno::IO), "{cell:?}");
            }
        }
        let ended = self.checkpoint.end(ring, CheckpointEnd::Drop).await;
        assert!(ended.is_ok(), "{ended:?} {cell:?}");
    }
}
