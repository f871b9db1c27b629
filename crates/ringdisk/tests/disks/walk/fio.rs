//! The client of a walk that is fio: it writes all of the disk in passes, each with bytes of its
//! own, and judges what it reads.
//!
//! A mount is a file for it; an export is reached by its own NBD client. The disk of a virtual
//! machine has QEMU's front end in between (`qemu-storage-daemon` of `bench/peer`, over libblkio),
//! whose NBD export fio works on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{Finished, LIMIT, Process, command, until};
use rustix::process::Signal;
use tempfile::TempDir;

use super::How;
use crate::common::peer::peer;
use crate::common::serving::SIZE;

/// Lengths of requests; a pass has one of them.
const LENGTHS: [&str; 5] = ["16k", "64k", "4k", "32k", "128k"];

/// fio, and what it last wrote.
pub(super) struct Fio {
    /// Words that name the disk.
    disk: Vec<String>,
    /// The number of the last pass, which has written all of the disk.
    pass: u64,
    /// QEMU's front end, of the disk of a machine.
    front_end: Option<Process>,
    directory: TempDir,
}

impl Fio {
    /// `None`: QEMU with libblkio is not installed here.
    pub(super) fn on(how: How, target: &Path, seed: u64) -> Option<Fio> {
        let directory = scratch();
        let (disk, front_end) = match how {
            How::Mount | How::KeptMount => (of_file(target, true), None),
            How::Nbd => (of_export(target, ""), None),
            How::Machine | How::KeptMachine => {
                let socket = directory.path().join("nbd");
                let front_end = front_end(target, &socket)?;
                (of_export(&socket, "disk"), Some(front_end))
            }
        };
        let mut fio = Fio { disk, pass: seed << 16, front_end, directory };
        fio.pass();
        Some(fio)
    }

    /// * `disk`: the words that name it.
    fn command(&self, disk: &[String], more: &[&str]) -> Command {
        let pass = self.pass;
        let mut fio = command(&["fio", "--name=walk", "--rw=randwrite", "--iodepth=8", "--thread"]);
        let length = LENGTHS[usize::try_from(pass % LENGTHS.len() as u64).expect("small")];
        // The bytes are the number of the pass and the offset of the block: fio compares headers of
        // its own with `--verify_only`, and does not see those of an older pass.
        fio.args(["--verify=pattern", "--verify_state_save=0", "--verify_fatal=1"]);
        fio.arg(format!("--verify_pattern=0x{pass:08x}%o")).arg(format!("--randseed={pass}"));
        fio.arg(format!("--bs={length}")).arg(format!("--size={SIZE}"));
        fio.args(disk).args(more).current_dir(self.directory.path());
        fio
    }

    /// Writes all of the disk, reads it again and flushes it.
    pub(super) fn pass(&mut self) {
        self.pass += 1;
        judged(self.command(&self.disk, &["--end_fsync=1"]));
    }

    /// The disk holds what the last pass wrote.
    pub(super) fn look(&self) {
        judged(self.command(&self.disk, &["--verify_only=1"]));
    }

    /// The same of an image that nobody serves any more.
    pub(super) fn judge(&self, bytes: &[u8]) {
        assert!(self.sees(bytes), "the image is not what pass {} wrote", self.pass);
        // It would see one byte that is not.
        let mut wrong = bytes.to_vec();
        wrong[bytes.len() / 2] ^= 1;
        assert!(!self.sees(&wrong));
    }

    fn sees(&self, bytes: &[u8]) -> bool {
        let image = self.directory.path().join("image");
        fs::write(&image, bytes).expect("a file");
        let fio = self.command(&of_file(&image, false), &["--verify_only=1"]);
        finished(fio).code() == Some(0)
    }

    /// Lets go of the disk.
    pub(super) fn leave(&mut self) {
        if let Some(front_end) = self.front_end.take() {
            front_end.signal(Signal::TERM);
            let ended = front_end.finish(LIMIT);
            assert_eq!(ended.code(), Some(0), "{}", ended.output());
        }
    }
}

fn of_file(path: &Path, is_direct: bool) -> Vec<String> {
    let direct = u8::from(is_direct);
    let words = [format!("--filename={}", text(path)), format!("--direct={direct}")];
    [&words[..], &[String::from("--ioengine=libaio")]].concat()
}

fn of_export(socket: &Path, name: &str) -> Vec<String> {
    let uri = format!("--uri=nbd+unix:///{name}?socket={}", text(socket));
    // The engine first: it knows the other one.
    vec![String::from("--ioengine=nbd"), uri]
}

/// QEMU's front end on a vhost-user socket, with an NBD socket for fio.
fn front_end(target: &Path, socket: &PathBuf) -> Option<Process> {
    let words = peer("qemu-storage-daemon")?;
    let mut command = Command::new(&words[0]);
    let disk = format!("driver=virtio-blk-vhost-user,node-name=disk,path={}", text(target));
    command.args(&words[1..]).args(["--blockdev", &format!("{disk},cache.direct=on")]);
    command.args(["--nbd-server", &format!("addr.type=unix,addr.path={}", text(socket))]);
    command.args(["--export", "type=nbd,id=export,node-name=disk,writable=on,name=disk"]);
    let process = Process::spawn(&mut command);
    let is_there = until(LIMIT, || std::os::unix::net::UnixStream::connect(socket).ok());
    assert!(is_there.is_some(), "{}", process.output());
    Some(process)
}

fn finished(mut fio: Command) -> Finished {
    Process::spawn(&mut fio).finish(LIMIT)
}

/// Runs fio, which must find nothing wrong.
fn judged(fio: Command) {
    let shown = format!("{fio:?}");
    let ended = finished(fio);
    assert_eq!(ended.code(), Some(0), "{shown}: {}", ended.output());
}
