//! Opens an inactive disk for requests (after migration or a hand-over).
//!
//! Promises: on an error the disk is as it was, without the locks that were taken meanwhile.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ringdisk_qcow2::Info;
use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, Storage};

use super::handed_over;
use crate::graph::{Graph, State};
use crate::layer::{Layer, Node, Raw};
use crate::live::{again, broken, named_as};
use crate::name::{printable, printable_path};
use crate::open::locks::{LockWait, give_back, lock_all};
use crate::open::{lock_of, raw_layer};
use crate::task_mutex::TaskGuard;
use crate::{Disk, Error, ErrorKind, ImageOptions};

/// Locks that are released unless the disk becomes active.
struct Taken(Vec<Arc<Storage>>);

impl Drop for Taken {
    fn drop(&mut self) {
        give_back(&self.0, Lock::Inactive);
    }
}

/// Shows other processes that this one waits for the top image, until it is dropped.
struct Wanted(Option<Arc<Storage>>);

impl Wanted {
    fn new(storages: &[Arc<Storage>]) -> Wanted {
        let top = storages.first().cloned();
        top.iter().for_each(|storage| storage.want(true));
        Wanted(top)
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.iter().for_each(|storage| storage.want(false));
    }
}

impl Disk {
    /// Makes the disk usable: waits for the locks of all its images ([`Disk::is_wanted`] shows that
    /// to the process that has them), then reads all metadata again. The watchers of the size are
    /// called. May be called any number of times: at the end of a migration, when one failed after
    /// [`Disk::deactivate`], when the disk came back. Does nothing on an active disk.
    ///
    /// * `wait`: the longest time to wait.
    ///
    /// Errors: `Locked` when other processes still have an image, with their names; `Invalid` when
    /// the chain is not what it was; `Busy` after [`Disk::hand_over`]; those of opening an image.
    /// The disk is as it was then, so the call can be repeated.
    pub async fn activate(&self, ring: &Ring, wait: Duration) -> Result<(), Error> {
        let wait = LockWait::new(wait);
        let _end = wait.end_early();
        let change = |disk: Arc<Disk>, ring: Ring| async move {
            let turn = disk.changes().lock().await;
            disk.activate_now(&ring, turn, State::Inactive, &wait).await
        };
        self.detached(ring, change).await
    }

    /// Makes the disk usable again after [`Disk::hand_over`], when the successor has failed and has
    /// ended. Does nothing on an active disk. Requests that come meanwhile wait for it.
    ///
    /// Errors: as [`Disk::activate`].
    pub async fn resume(&self, ring: &Ring) -> Result<(), Error> {
        let change = |disk: Arc<Disk>, ring: Ring| async move {
            let (turn, _resuming) = disk.turn_to_resume().await;
            disk.activate_now(&ring, turn, State::Quiet, &LockWait::new(Duration::ZERO)).await
        };
        self.detached(ring, change).await
    }

    /// Waits for the lock of changes. Requests wait for it behind this, from the moment on in which
    /// its place is taken.
    async fn turn_to_resume(&self) -> (TaskGuard<'_>, Resuming<'_>) {
        let mut lock = pin!(self.changes().lock());
        let mut resuming = None;
        let turn = poll_fn(|context| {
            let turn = lock.as_mut().poll(context);
            resuming.get_or_insert_with(|| Resuming::new(self));
            turn
        })
        .await;
        (turn, resuming.unwrap_or_else(|| Resuming::new(self)))
    }

    async fn activate_now(
        &self,
        ring: &Ring,
        turn: TaskGuard<'_>,
        from: State,
        wait: &LockWait,
    ) -> Result<(), Error> {
        let graph = self.graph();
        let mut taken = Taken(Vec::new());
        match graph.state {
            State::Active => return Ok(()),
            State::Broken => return Err(broken()),
            State::Inactive if from == State::Quiet => {
                graph.storages().iter().for_each(|storage| storage.share_locks(false));
                return Ok(());
            }
            State::Quiet if from != State::Quiet => return Err(handed_over()),
            // The locks were kept, and writes of the successor on this host are in the page cache.
            State::Quiet => {}
            State::Inactive => {
                let lock = lock_of(self.options());
                let mut storages = graph.storages();
                let all = storages.clone();
                // Layers below may have stayed locked.
                storages.retain(|storage| !storage.has_lock(lock));
                let _wanted = Wanted::new(&all);
                lock_all(ring, &storages, lock, Lock::Inactive, wait).await?;
                taken.0.clone_from(&storages);
                for storage in all {
                    storage.catch_up(ring).await.map_err(|errno| {
                        Error::os(format!("cannot read '{}' anew", storage.name()), errno)
                    })?;
                }
            }
        }
        let mut drained = self.gateway().drain(ring, turn).await;
        let layers = reload(ring, drained.graph(), self.options()).await?;
        let mut fresh = drained.graph().with_layers(layers);
        fresh.state = State::Active;
        for storage in fresh.storages() {
            storage.share_locks(false);
        }
        self.put(&mut drained, fresh, true);
        taken.0.clear();
        Ok(())
    }
}

/// Counts in [`Disk::resuming`] until it is dropped.
struct Resuming<'a>(&'a Disk);

impl<'a> Resuming<'a> {
    fn new(disk: &'a Disk) -> Resuming<'a> {
        disk.resuming.fetch_add(1, Ordering::AcqRel);
        Resuming(disk)
    }
}

impl Drop for Resuming<'_> {
    fn drop(&mut self) {
        self.0.resuming.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Opens the layers again, with the present content of their files.
async fn reload(
    ring: &Ring,
    graph: &Graph,
    options: &ImageOptions,
) -> Result<Vec<Arc<Layer>>, Error> {
    let mut layers = Vec::with_capacity(graph.layers.len());
    for old in &graph.layers {
        layers.push(Arc::new(reload_layer(ring, old, options).await?));
    }
    Ok(layers)
}

async fn reload_layer(ring: &Ring, old: &Layer, options: &ImageOptions) -> Result<Layer, Error> {
    match &old.node {
        Node::Null(null) => Ok(Layer::null(&null.options(old.size()))),
        Node::Frozen(frozen) => {
            Ok(named_as(Layer::new(Node::Frozen(Arc::clone(frozen)), old.size()), old))
        }
        Node::Raw(Raw { storage, offset, fixed_size, guard }) => {
            let asked = Arc::clone(storage);
            ring.offload(move || asked.refresh_len()).await.map_err(|errno| {
                Error::os(format!("cannot find the length of '{}'", storage.name()), errno)
            })?;
            let size = fixed_size.then(|| old.size());
            let mut fresh = raw_layer(Arc::clone(storage), old.name(), offset.0, size)?;
            fresh.is_writable = old.is_writable;
            if let Node::Raw(raw) = &mut fresh.node {
                raw.guard.clone_from(guard);
            }
            Ok(named_as(fresh, old))
        }
        Node::Qcow2(before) => {
            before.forget_names();
            let fresh = again(ring, old, options, old.is_writable).await?;
            if let Some(image) = fresh.qcow2() {
                check_names(old, before.info(), image.info())?;
            }
            Ok(fresh)
        }
    }
}

/// Checks that the header of an image still names the files that are open.
fn check_names(layer: &Layer, before: &Info, now: &Info) -> Result<(), Error> {
    let names = |info: &Info| {
        (info.backing_file.clone(), info.backing_format.clone(), info.data_file.clone())
    };
    if names(before) == names(now) && before.external_data_file == now.external_data_file {
        return Ok(());
    }
    let shown = |info: &Info| {
        let file = info.backing_file.as_deref().or(info.data_file.as_deref());
        file.map_or_else(|| "no other file".to_owned(), |file| format!("'{}'", printable(file)))
    };
    Err(Error::new(
        ErrorKind::Invalid,
        format!(
            "'{}' names {} now and named {} when it was opened; open the disk again",
            printable_path(layer.name()),
            shown(now),
            shown(before)
        ),
    ))
}
