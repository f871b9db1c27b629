//! Operations that need the image for themselves, between two streams.

use ringdisk_qcow2::{Bytes, ResizeOptions};
use ringdisk_testkit::oracle::{Oracle, SECTOR};

use crate::config::{Between, index};
use crate::live::Base;
use crate::world::World;

/// Snapshots that exist at once: the smallest refcounts that are used with them count to 3.
const SNAPSHOTS_MAX: usize = 2;

fn text<T>(result: Result<T, ringdisk_qcow2::Error>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

impl World {
    /// What happens between two streams.
    pub(crate) async fn between(&mut self) -> Result<(), String> {
        for _ in 0..1 + self.prng.below(3) {
            let snapshots = match self.config.between {
                Between::Snapshots => true,
                Between::Resize => false,
                Between::Both => self.prng.coin(),
                Between::Nothing | Between::Reopen => return Ok(()),
            };
            // Boxed: futures in futures get too deep for the compiler.
            if snapshots {
                Box::pin(self.snapshot()).await?;
            } else {
                Box::pin(self.resize()).await?;
            }
        }
        Ok(())
    }

    /// What the disk is once a change has brought everything to stable storage that was
    /// acknowledged before it.
    fn settled(&self) -> Oracle {
        let mut now = self.shore.oracle.borrow().clone();
        now.settle();
        now
    }

    /// Makes, applies or deletes a snapshot.
    async fn snapshot(&mut self) -> Result<(), String> {
        let names: Vec<String> = self.snapshots.keys().cloned().collect();
        let name = names.get(index(&mut self.prng, names.len() as u64)).cloned();
        match (name, self.prng.below(3)) {
            (Some(name), 0) => self.apply_snapshot(name).await,
            (Some(name), 1) => self.delete_snapshot(name).await,
            (Some(name), _) if names.len() >= SNAPSHOTS_MAX => self.delete_snapshot(name).await,
            _ => self.create_snapshot().await,
        }
    }

    async fn create_snapshot(&mut self) -> Result<(), String> {
        let name = format!("snapshot {}", self.prng.below(1 << 32));
        let now = self.settled();
        self.snapshots.insert(name.clone(), now.clone());
        let wanted = name.clone();
        self.change("snapshot create", now, |ring, mut image| async move {
            text(image.snapshot_create(&ring, &wanted).await)?;
            Ok(image)
        })
        .await?;
        self.required.insert(name);
        Ok(())
    }

    async fn apply_snapshot(&mut self, name: String) -> Result<(), String> {
        let after = self.settled().restored(&self.snapshots[&name]);
        self.change("snapshot apply", after, |ring, mut image| async move {
            text(image.snapshot_apply(&ring, &name).await)?;
            Ok(image)
        })
        .await
    }

    async fn delete_snapshot(&mut self, name: String) -> Result<(), String> {
        self.required.remove(&name);
        let now = self.settled();
        let wanted = name.clone();
        self.change("snapshot delete", now, |ring, mut image| async move {
            text(image.snapshot_delete(&ring, &wanted).await)?;
            Ok(image)
        })
        .await?;
        self.snapshots.remove(&name);
        Ok(())
    }

    /// Grows or shrinks the disk.
    async fn resize(&mut self) -> Result<(), String> {
        if self.config.shape.version == 2 && !self.snapshots.is_empty() {
            // A snapshot of such an image does not say how large its disk is.
            return Ok(());
        }
        let mut after = self.settled();
        let old = after.size();
        let span = [SECTOR * 5, self.config.cluster() * 3, old / 2][index(&mut self.prng, 3)];
        let step = (1 + self.prng.below(span / SECTOR)) * SECTOR;
        let grow = self.prng.coin() || step >= old;
        let new = if grow { old + step } else { old - step };
        after.resize(new);
        after.watch(old.min(new)..new.min(old + 4 * self.config.cluster()));
        let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
        let below = Base(self.config.below);
        let label = format!("resize from {old:#x} to {new:#x}");
        self.change(&label, after, move |ring, mut image| async move {
            text(image.resize(&ring, Bytes(new), &options, &below).await)?;
            Ok(image)
        })
        .await
    }
}
