//! The job `mirror`: a copy of the disk that stays in step with it, and that the disk may switch
//! over to.
//!
//! Promises: as [`ringdisk_disk::Disk::mirror`]: until the switch-over has succeeded the disk is
//! what it was; errors of the target are no errors of its clients.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use ringdisk_disk::name::is_export;
use ringdisk_disk::{
    Disk, Error, Format, Layer, MirrorControl, MirrorEnd, MirrorOptions, MirrorSync, Progress,
};
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;
use serde_json::Value;

use super::begin::{Asked, all_shown, shown};
use super::job::Kind;
use crate::control::disk::DiskControl;
use crate::control::protocol::Mirror;
use crate::failure::{Exit, Failure};
use crate::terminal::visible;

type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + 'a>>;

impl DiskControl {
    /// Mirrors; in the background the answer comes at once.
    ///
    /// * `file`: of the target, where the helper process holds it since the user has named it:
    ///   device and inode number.
    /// * `progress`: of the client that asks.
    ///
    /// Errors: the target cannot be opened, or is none for this disk; another change is under way;
    /// in the foreground those of the job.
    pub(in crate::control) async fn mirror(
        &self,
        ring: &Ring,
        wanted: &Mirror,
        file: Option<(u64, u64)>,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let result = self.mirror_held(ring, wanted, progress).await;
        if let (Err(_), Some(file), Ok(disk)) = (&result, file, self.disk()) {
            self.held().let_go(file, &disk);
        }
        result
    }

    async fn mirror_held(
        &self,
        ring: &Ring,
        wanted: &Mirror,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        self.entered(ring, progress).await?;
        let terms = wanted.job.clone().unwrap_or_default();
        if !terms.background && !wanted.complete {
            let text = "a mirror that does not complete runs in the background";
            return Err(Failure::new(Exit::Usage, text));
        }
        let options = options(wanted)?;
        let disk = self.disk()?;
        let layers = disk.layers();
        let path = Path::new(&wanted.target);
        check_is_other(&layers, path)?;
        self.check_no_change()?;
        let target = self.open_target(ring, &disk, wanted).await?;
        let what = format!("{} to {}", shown(&layers[0]), shown(&target.layers()[0]));
        let mut holds = all_shown(&layers);
        holds.extend(all_shown(&target.layers()));
        let control = Arc::new(MirrorControl::new());
        if wanted.complete {
            // It has not begun, so nothing refuses this yet; `check_mirror` has.
            control.complete(true)?;
        }
        let mirror = Some(Arc::clone(&control));
        let asked = Asked { kind: Kind::Mirror, what, holds, terms, mirror };
        let held = self.held();
        self.run_job(ring, asked, None, progress, |disk, ring, progress| async move {
            if let Some(id) = file_of(&target) {
                held.has_file(id);
            }
            let new = shown(&target.layers()[0]);
            // On the heap, as what opens the target: with all that they wait for they are large.
            let mirror: Boxed<'_, MirrorEnd> =
                Box::pin(disk.mirror(&ring, target, options, &progress, &control));
            let end = mirror.await?;
            Ok(told(end, &new, &layers))
        })
        .await
    }

    /// Opens the target as the disk would be, and looks whether it can be one.
    async fn open_target(
        &self,
        ring: &Ring,
        disk: &Arc<Disk>,
        wanted: &Mirror,
    ) -> Result<Arc<Disk>, Failure> {
        let explain = |failure| self.advice().explain(failure, Some(&wanted.target));
        let format = wanted.format.as_deref().map(str::parse::<Format>).transpose()?;
        let path = Path::new(&wanted.target);
        let opening: Boxed<'_, Arc<Disk>> =
            Box::pin(disk.open_mirror(ring, path, format, wanted.protect_raw));
        let target = opening.await.map_err(|error| {
            explain(Failure::from(error).context("the target of the mirror cannot be opened"))
        })?;
        disk.check_mirror(&target, wanted.complete)?;
        Ok(target)
    }
}

/// What the words of a client mean.
///
/// Errors: no such word.
fn options(wanted: &Mirror) -> Result<MirrorOptions, Failure> {
    let sync = match wanted.sync.as_deref() {
        None | Some("full") => MirrorSync::Full,
        Some("top") => MirrorSync::Top,
        Some("none") => MirrorSync::None,
        Some(other) => {
            let text = format!("no such sync: '{}'; known: full, top, none", visible(other));
            return Err(Failure::new(Exit::Usage, text));
        }
    };
    Ok(MirrorOptions { sync, write_blocking: wanted.write_blocking })
}

/// Errors: the target is an image of the disk.
fn check_is_other(layers: &[Arc<Layer>], path: &Path) -> Result<(), Failure> {
    let id = match is_export(path) {
        true => None,
        false => path.metadata().ok().map(|meta| Storage::identity_of(&meta)),
    };
    let is_it = |layer: &Arc<Layer>| {
        let files = [layer.file(), layer.data_storage()].into_iter().flatten();
        let mut ids = files.filter_map(|file| file.identity());
        layer.name() == path || ids.any(|file| Some(file) == id)
    };
    match layers.iter().position(is_it) {
        None => Ok(()),
        Some(0) => Err(Failure::new(
            Exit::Usage,
            format!("{} is the image of the disk itself", shown(&layers[0])),
        )
        .hint("name another file, device or export")),
        Some(at) => Err(Failure::new(
            Exit::Usage,
            format!("{} is an image of the chain of the disk", shown(&layers[at])),
        )
        .hint("`ringdisk ctl DISK commit` writes into images of the chain; a mirror does not")),
    }
}

/// Device and inode of the file of the target, as the helper process knows it.
fn file_of(target: &Disk) -> Option<(u64, u64)> {
    let layers = target.layers();
    let meta = crate::confine::by_descriptor(layers[0].file()?)?.metadata().ok()?;
    Some((meta.dev(), meta.ino()))
}

/// What a mirror has done, for people.
///
/// * `new`: the target.
/// * `old`: the images that the disk had.
fn told(end: MirrorEnd, new: &str, old: &[Arc<Layer>]) -> String {
    match end {
        MirrorEnd::Pivoted => format!(
            "The disk is in {new} now: name that one when it is served again. Left behind as they \
             were at that moment, and used no longer unless {new} has them below it: {}",
            all_shown(old).join(" ")
        ),
        MirrorEnd::Copied => format!(
            "{new} holds what the disk held at this moment, and does not follow it any more."
        ),
    }
}
