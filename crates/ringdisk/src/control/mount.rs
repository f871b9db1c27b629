//! What the control socket of a mount does.
//!
//! Promises: commands that change the disk run one at a time; a second one is told so. The clients
//! of the disk go on meanwhile, except where the disk itself has to stop them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_disk::{Disk, Progress};
use ringdisk_ring::Ring;
use serde_json::{Value, json};

use crate::control::protocol::{Command, NewSize, Refusal, Request, Resize};
use crate::control::server::Commands;
use crate::report::{Exit, Failure};
use crate::serve::Handle;
use crate::size::SizeChange;

/// A mount under control.
pub(crate) struct MountControl {
    disk: Arc<Disk>,
    handle: Handle,
    changing: AtomicBool,
    /// The stop that signals ask for too.
    stop: Box<dyn Fn() + Send + Sync>,
}

impl MountControl {
    /// * `stop`: asks for a clean stop; returns at once.
    pub(crate) fn new(
        disk: Arc<Disk>,
        handle: Handle,
        stop: impl Fn() + Send + Sync + 'static,
    ) -> MountControl {
        MountControl { disk, handle, changing: AtomicBool::new(false), stop: Box::new(stop) }
    }

    fn stats(&self) -> Value {
        let report = self.handle.stats();
        let mut value = report.to_json();
        if let Value::Object(object) = &mut value {
            object.insert(String::from("size"), json!(self.disk.size()));
            object.insert(String::from("text"), json!(report.to_string()));
        }
        value
    }

    async fn resize(&self, ring: &Ring, wanted: &Resize) -> Result<Value, Failure> {
        let old = self.disk.size();
        let change = match wanted.size {
            NewSize::To(size) => SizeChange::To(size),
            NewSize::Grow(by) => SizeChange::Grow(by),
            NewSize::Shrink(by) => SizeChange::Shrink(by),
        };
        let size = change.apply(old).map_err(|text| Failure::new(Exit::Usage, text))?;
        if size < old && !wanted.shrink {
            return Err(Failure::new(
                Exit::Usage,
                format!("the disk has {old} bytes; what is behind {size} would be lost"),
            )
            .hint("add --shrink if that is meant"));
        }
        if !self.disk.can_resize() {
            return Err(Failure::new(Exit::Unsupported, "this disk cannot change its size"));
        }
        self.disk.resize(ring, size).await.map_err(|errno| {
            Failure::system("cannot change the size", &errno.into(), Exit::Storage)
        })?;
        Ok(json!({ "old-size": old, "size": self.disk.size() }))
    }
}

/// Held while a command changes the disk.
struct Changing<'a>(&'a AtomicBool);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl MountControl {
    fn change(&self) -> Result<Changing<'_>, Failure> {
        if self.changing.swap(true, Ordering::AcqRel) {
            return Err(Failure::new(Exit::Locked, "another command is changing the disk")
                .hint("wait until it is done"));
        }
        Ok(Changing(&self.changing))
    }
}

impl Commands for MountControl {
    async fn execute(
        &self,
        ring: &Ring,
        request: &Request,
        _progress: &Progress,
    ) -> Result<Value, Refusal> {
        match Command::read(request)? {
            Command::Stats => Ok(self.stats()),
            Command::Stop => {
                (self.stop)();
                Ok(json!({}))
            }
            Command::Resize(wanted) => {
                let _changing = self.change()?;
                Ok(self.resize(ring, &wanted).await?)
            }
            Command::Snapshot(_) | Command::Commit(_) => {
                Err(Failure::new(Exit::Unsupported, "this version cannot do that yet").into())
            }
        }
    }
}
