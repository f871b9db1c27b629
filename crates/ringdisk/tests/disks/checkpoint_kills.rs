//! `kill -9` of a server at the steps of a checkpoint. Whatever it was doing then: QEMU finds
//! nothing wrong with the image, which holds what was answered; a bitmap that is valid has
//! everything that was written since it began, so that an incremental backup by it is the disk as
//! it is now; one that is not valid is refused by its name; and a full backup works.

mod judge;
mod load;
mod storage;

use std::path::{Path, PathBuf};

use ringdisk_testkit::images::{qcow2, qemu_io, reference};
use ringdisk_testkit::mount::{scratch, text};
use tempfile::TempDir;

use crate::common::serving::{Daemon, ctl, serve_command};
use crate::common::tools::{Ran, ringdisk};
use judge::{Base, Known};

/// Bytes of the disk.
const SIZE: usize = 4 << 20;
/// The bitmap that is there before the server starts, and the one that the checkpoint starts.
const OLD: &str = "old";
const NEW: &str = "new";

/// An image, with the full backup that was made when its bitmap [`OLD`] began.
struct Template {
    directory: TempDir,
    known: Known,
}

impl Template {
    /// What has changed since that backup was written, and recorded, by QEMU.
    fn new() -> Template {
        let directory = scratch();
        let d = directory.path();
        let image = d.join("disk.qcow2");
        qcow2(&image, "4M", "");
        qemu_io(&image, "qcow2", &["write -P 1 0 2M"]);
        ringdisk(d, &["backup", "disk.qcow2", "full.qcow2", "--bitmap", OLD]).ok();
        qemu_io(&image, "qcow2", &["write -P 2 1M 128k", "write -P 3 3M 4k"]);
        let bytes = std::fs::read(reference(&image, "qcow2")).expect("the disk");
        assert_eq!(bytes.len(), SIZE);
        Template { known: Known::new(bytes), directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A directory with the backup, and what it is the base of.
    fn copy(&self) -> (TempDir, Vec<Base>) {
        let directory = scratch();
        let full = directory.path().join("full.qcow2");
        std::fs::copy(self.path("full.qcow2"), &full).expect("a copy");
        (directory, vec![Base { bitmap: OLD, backup: full }])
    }
}

/// `ringdisk serve IMAGE --nbd SOCKET`.
fn serve(image: &str, socket: &Path) -> Daemon {
    Daemon::of(&mut serve_command(&[image, "-f", "qcow2", "--nbd", text(socket)]))
}

/// The words that begin the checkpoint of these tests.
const BEGIN: [&str; 6] = ["checkpoint", "c1", "--since", OLD, "--bitmap", NEW];

fn end(socket: &Path, words: &[&str]) -> Ran {
    ctl(socket, &[&["checkpoint", "--end", "c1"], words].concat())
}
