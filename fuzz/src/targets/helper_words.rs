//! What an attacker who controls a confined process sends out of its sandbox: tasks and requests to
//! its helper process (with the model of what may come of them), the memory that the process leaves
//! to the next one of a kept mount, the state that it hands to a successor. Nothing panics, and
//! nothing is touched but what was named at the start.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringdisk_daemon::helper::model;
use ringdisk_daemon::keep::{sealed_state, slots};
use ringdisk_daemon::upgrade::link;
use ringdisk_disk::{Disk, HandOver, ImageOptions};
use rustix::fs::{MemfdFlags, memfd_create};
use tempfile::TempDir;

use crate::{Input, with_ring};

/// Where the slots of a state begin, and their bytes: random offsets hardly ever meet them.
const SLOTS: [u64; 2] = [4096, 4096 + (64 << 10)];

thread_local! {
    static DIRECTORY: TempDir = tempfile::tempdir().expect("a directory");
}

fn memory() -> File {
    File::from(memfd_create(c"fuzz", MemfdFlags::CLOEXEC).expect("memory"))
}

/// The memory of a kept mount.
fn kept(input: &mut Input<'_>) {
    let memory = memory();
    let sound = input.byte();
    for number in 1..=u64::from(sound % 3) {
        slots::IMAGES.put(&memory, number, b"{\"version\":1}").expect("room");
    }
    let (slot, at) = (SLOTS[usize::from(sound) / 128], input.number(1));
    memory.write_all_at(input.0, slot + at).expect("memory");
    if sound % 16 == 0 {
        memory.set_len(slot + at).expect("memory");
    }
    if let Some((number, text)) = slots::IMAGES.newest(&memory) {
        assert!(number != 0 && text.len() <= 64 << 10);
        // Another one can follow, and is found then.
        if number < 1 << 62 {
            slots::IMAGES.put(&memory, number + 1, b"next").expect("room");
            assert_eq!(slots::IMAGES.newest(&memory), Some((number + 1, b"next".to_vec())));
        }
    }
    assert!(sealed_state::open(&memory.into()).is_err(), "it is not sealed");
}

/// A handed, as bytes of the stream and as the words of a disk with descriptors.
fn handed(input: &mut Input<'_>) {
    let (mut ours, theirs) = UnixStream::pair().expect("sockets");
    ours.set_nonblocking(true).expect("a setting");
    let _ = ours.write_all(input.0);
    drop(ours);
    match link::receive(&theirs, Duration::from_secs(1)) {
        Ok(Ok(handed)) => assert!(handed.fds.is_empty(), "there were none"),
        Ok(Err(_)) | Err(_) => {}
    }
}

/// The words of a disk, with descriptors of any kind.
fn disk(input: &mut Input<'_>) {
    let kinds = input.byte();
    let one = |kind: u8| -> OwnedFd {
        let memory = memory();
        match kind % 4 {
            0 => memory.into(),
            1 => {
                memory.set_len(1 << 20).expect("memory");
                memory.into()
            }
            2 => rustix::pipe::pipe().expect("a pipe").0,
            _ => File::open("/dev/null").expect("it is there").into(),
        }
    };
    let fds: Vec<OwnedFd> = (0..kinds % 4).map(|index| one(kinds >> (2 * index + 2))).collect();
    let mut text = String::from_utf8_lossy(input.0).into_owned();
    // What the description has to say of each file is not to be guessed.
    for (index, fd) in fds.iter().enumerate() {
        let stat = rustix::fs::fstat(fd).expect("a descriptor");
        text = text.replace(&format!("#{index}"), &format!("{},{}", stat.st_dev, stat.st_ino));
    }
    let handed = HandOver { description: text, fds };
    let disk = with_ring(|ring| async move {
        Disk::open_handed(&ring, handed, &ImageOptions::default()).await
    });
    if let Ok(disk) = disk {
        let _ = disk.size();
        assert!(!disk.layers().is_empty());
    }
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    match input.byte() % 5 {
        0 | 1 => DIRECTORY.with(|directory| model::run(directory.path(), input.0)),
        2 => model::hear(input.0),
        3 => kept(&mut input),
        _ if input.byte() % 2 == 0 => handed(&mut input),
        _ => disk(&mut input),
    }
}
