//! qemu-nbd as the server, if it is installed.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use ringdisk_ring::IoBuf;
use ringdisk_storage::{Allocation, NbdOptions, Storage};

use crate::server::address;
use crate::{bytes, on_ring, pattern};

const SIZE: usize = 8 << 20;

struct Qemu {
    child: Child,
    directory: tempfile::TempDir,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Qemu {
    /// `None`: it is not installed.
    fn start(words: &[&str]) -> Option<Qemu> {
        let directory = tempfile::tempdir().expect("directory");
        let image = directory.path().join("image");
        let file = std::fs::File::create(&image).expect("image");
        file.set_len(SIZE as u64).expect("size");
        let child = Qemu::spawn(directory.path(), words)?;
        Some(Qemu { child, directory })
    }

    fn spawn(directory: &Path, words: &[&str]) -> Option<Child> {
        let socket = directory.join("socket");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("qemu-nbd");
        command.args(["-f", "raw", "-t", "-k"]).arg(&socket).args(words);
        command.arg(directory.join("image")).stderr(Stdio::null());
        let child = command.spawn().ok()?;
        let began = Instant::now();
        // A client that only connects does not count.
        while UnixStream::connect(&socket).is_err() {
            assert!(began.elapsed() < Duration::from_secs(10), "qemu-nbd does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(child)
    }

    fn open(&self) -> Storage {
        let address = address(&self.directory.path().join("socket"));
        Storage::open_nbd(&address, &NbdOptions::default()).expect("open")
    }
}

#[test]
fn an_export_of_qemu_nbd_is_written_read_and_mapped() {
    for words in [&["-e", "1"][..], &["-e", "8", "--discard=unmap"]] {
        let Some(qemu) = Qemu::start(words) else { return };
        let storage = Arc::new(qemu.open());
        std::thread::scope(|scope| {
            for thread in 0..2usize {
                let storage = &storage;
                scope.spawn(move || {
                    on_ring(|ring| async move {
                        let ring = &ring;
                        join_all((0..32usize).map(|task| async move {
                            let place = thread * 32 + task;
                            let (offset, len) = (place as u64 * 65536, 40_000);
                            let written = pattern(len, place);
                            assert_eq!(storage.write(ring, offset, &written).await, Ok(len));
                            let read = IoBuf::new(len, 1);
                            assert_eq!(storage.read(ring, offset, &read).await, Ok(len));
                            assert_eq!(read.to_vec(), bytes(len, place));
                        }))
                        .await;
                        assert_eq!(storage.flush(ring).await, Ok(()));
                    });
                });
            }
        });
        on_ring(|ring| async move {
            assert_eq!(storage.write_zeroes(&ring, 0, 1 << 20, true, true).await, Ok(()));
            let (kind, _) = storage.allocation(&ring, 0, 4096).await.expect("status");
            assert_eq!(kind, Allocation::Hole);
            let (kind, _) = storage.allocation(&ring, 2 << 20, 4096).await.expect("status");
            assert_eq!(kind, Allocation::Data);
        });
        let file = std::fs::read(qemu.directory.path().join("image")).expect("image");
        assert_eq!(file[20 * 65536..][..40_000], bytes(40_000, 20));
        assert!(file[..1 << 20].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn requests_wait_while_qemu_nbd_is_started_anew() {
    let Some(mut qemu) = Qemu::start(&["-e", "4"]) else { return };
    let storage = Arc::new(qemu.open());
    let theirs = Arc::clone(&storage);
    let worker = std::thread::spawn(move || {
        on_ring(|ring| async move {
            let (storage, ring) = (&*theirs, &ring);
            join_all((0..16usize).map(|place| async move {
                let (offset, began) = (place as u64 * 65536, Instant::now());
                let mut round = 0;
                while began.elapsed() < Duration::from_millis(1500) {
                    let written = pattern(8192, place + round);
                    assert_eq!(storage.write(ring, offset, &written).await, Ok(8192));
                    let read = IoBuf::new(8192, 1);
                    assert_eq!(storage.read(ring, offset, &read).await, Ok(8192));
                    assert_eq!(read.to_vec(), bytes(8192, place + round));
                    round += 1;
                }
            }))
            .await;
        });
    });
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(200));
        qemu.child.kill().expect("kill");
        qemu.child.wait().expect("wait");
        std::thread::sleep(Duration::from_millis(100));
        qemu.child = Qemu::spawn(qemu.directory.path(), &["-e", "4"]).expect("start");
    }
    worker.join().expect("all requests succeed");
}
