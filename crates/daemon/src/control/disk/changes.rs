//! Short changes of a disk in use: who serves its virtqueues, limits, size, snapshots, and the
//! backing file.
//!
//! Promises: a change that fails leaves the disk as it was, and says why.

use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{
    Backing, Bytes, Error, ErrorKind, Format, OverlayOptions, Progress, ResizeOptions,
    SnapshotChange,
};
use ringdisk_qcow2::Preallocation;
use ringdisk_ring::Ring;
use ringdisk_throttle::Limits;
use serde_json::{Value, json};

use super::DiskControl;
use super::job_kinds::chain;
use crate::control::protocol::{Limit, NewBacking, Resize, Snapshot};
use crate::failure::{Exit, Failure};
use crate::new_file::check_new_name;
use crate::size::SizeChange;
use crate::terminal::visible;

impl DiskControl {
    pub(super) async fn accel(&self, ring: &Ring, on: bool) -> Result<Value, Failure> {
        if on && !self.disk()?.limits().are_none() {
            return Err(Failure::new(
                Exit::Unsupported,
                "the disk has limits, which the host kernel does not know",
            )
            .hint("`ringdisk ctl TARGET limit none` removes them"));
        }
        let serving = Arc::clone(&self.serving);
        self.checkpoints.accel_is_wanted(on);
        // Requests that the kernel has are waited for.
        let switched = ring.offload(move || serving.switch_accel(on)).await;
        match switched {
            Ok(serves) => Ok(json!({ "on": on, "kernel-serves": serves })),
            Err(why) => Err(Failure::new(Exit::Usage, why)),
        }
    }

    /// Shows the limits of the disk, or changes them.
    pub(super) async fn limit(&self, ring: &Ring, wanted: &Limit) -> Result<Value, Failure> {
        let disk = self.disk()?;
        let usage = |text: String| Failure::new(Exit::Usage, text);
        let limits = match &wanted.change {
            None => disk.limits(),
            Some(text) => {
                let wanted = disk.limits().changed(text).map_err(|why| usage(why.to_string()))?;
                if !wanted.are_none() {
                    let serving = Arc::clone(&self.serving);
                    // Requests that the kernel has are waited for.
                    let is_ours = ring.offload(move || serving.serve_here()).await;
                    is_ours.map_err(usage)?;
                }
                // Again: another command may have changed others meanwhile.
                let change = |current: &Limits| {
                    let changed = current.changed(text);
                    changed.map_err(|why| Error::new(ErrorKind::Invalid, why.to_string()))
                };
                let limits = disk.change_limits(change)?;
                self.happened(&disk, "limited", &format!("the limits are {limits} now"));
                limits
            }
        };
        let waits = disk.limit_waits();
        Ok(json!({
            "limits": limits.to_string(),
            "waiting": waits.now,
            "waited": waits.requests,
            "waited-seconds": waits.time.as_secs_f64(),
        }))
    }

    pub(super) async fn resize(
        &self,
        ring: &Ring,
        wanted: &Resize,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let usage = |text: String| Failure::new(Exit::Usage, text);
        let disk = self.disk()?;
        // What is relative is computed when its turn comes: clients and other changes may be faster
        // than this command.
        if wanted.size == SizeChange::To(0) && disk.size() > Bytes::ZERO {
            return Err(usage(String::from("nothing would be left of the disk")));
        }
        let word = wanted.preallocation.as_deref().unwrap_or("off");
        let preallocation = Preallocation::of_word(word)
            .ok_or_else(|| usage(format!("no such preallocation: '{}'", visible(word))))?;
        let options = ResizeOptions { shrink: wanted.shrink, preallocation };
        // Zeroes for a large disk take long: the client that asked for them may have left, and a
        // stop must not wait for them.
        let resized = disk.resize_unless_cancelled(ring, wanted.size, options, progress).await;
        let resized = resized.map_err(Failure::of_change)?;
        Ok(json!({ "old-size": resized.before.0, "size": resized.after.0 }))
    }

    pub(super) async fn snapshot(&self, ring: &Ring, wanted: &Snapshot) -> Result<Value, Failure> {
        let disk = self.disk()?;
        match (&wanted.file, &wanted.internal) {
            (Some(file), None) => {
                check_new_name(Path::new(file))?;
                disk.add_overlay(ring, file, OverlayOptions::default()).await?;
                let text = format!(
                    "Further writes go to '{}': name that one when the disk is served again.",
                    visible(file)
                );
                Ok(json!({ "file": file, "text": text }))
            }
            (None, Some(name)) => {
                disk.snapshot(ring, SnapshotChange::Create(name.clone())).await?;
                let text = format!("The image holds the snapshot '{}' now.", visible(name));
                Ok(json!({ "internal": name, "text": text }))
            }
            _ => Err(Failure::new(Exit::Usage, "give either 'file' or 'internal'")),
        }
    }

    pub(super) async fn backing(
        &self,
        ring: &Ring,
        wanted: &NewBacking,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let usage = |text: &str| Failure::new(Exit::Usage, text);
        let backing = match (&wanted.file, &wanted.format) {
            (None, None) => None,
            (None, Some(_)) => {
                return Err(usage("a format of a backing file is given, and no backing file"));
            }
            (Some(_), None) => {
                return Err(usage(
                    "the format of the backing file is missing; it is never guessed",
                ));
            }
            (Some(file), Some(format)) => {
                Some(Backing { file: file.as_bytes().to_vec(), format: format.parse::<Format>()? })
            }
        };
        let disk = self.disk()?;
        disk.change_backing(ring, backing, progress).await?;
        Ok(chain(&disk))
    }
}
