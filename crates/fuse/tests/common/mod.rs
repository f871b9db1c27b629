//! The smallest server that works: one thread, one request at a time, on the first descriptor of a
//! mount.
//!
//! It uses the protocol and file modules only, so these tests hold for every transport.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use ringdisk_disk::Disk;
use ringdisk_fuse::abi::{REQUEST_HEAD_BYTES, WRITE_DATA_OFFSET};
use ringdisk_fuse::file::{FileOptions, FileServer};
use ringdisk_fuse::mount::{Method, Mount, MountOptions, Unmount, clone_device, mount};
use ringdisk_fuse::negotiate::{InitAnswer, Profile, negotiate};
use ringdisk_fuse::reply::{ReplyBuf, data_header};
use ringdisk_fuse::request::{Operation, Request};
use ringdisk_ring::{Config, Errno, IoBuf, Runtime};
use ringdisk_testkit::limits::{needs, needs_root};
use rustix::event::{PollFd, PollFlags, poll};

/// What a test wants to differ.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    pub growable: bool,
    pub resizable: bool,
    pub read_only: bool,
    pub allow_other: bool,
    pub kernel_cache: bool,
    pub method: Method,
}

/// A disk that is mounted and served; everything is taken down on drop.
#[derive(Debug)]
pub struct Served {
    pub mount: Option<Mount>,
    pub server: Arc<FileServer>,
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

impl Served {
    pub fn new(disk: Arc<Disk>, wanted: Wanted) -> Served {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.raw");
        std::fs::write(&path, b"").expect("a mountpoint");
        let profile = Profile::detect(wanted.kernel_cache);
        let options = MountOptions {
            source: "test,image \\ name".into(),
            read_only: wanted.read_only,
            allow_other: wanted.allow_other,
            max_read: profile.transfer_bytes(),
            method: wanted.method,
        };
        let mount = mount(&path, &options).expect("a mount");
        let device = mount.device().try_clone_to_owned().expect("a duplicate");
        let options = FileOptions {
            growable: wanted.growable,
            resizable: wanted.resizable,
            read_only: wanted.read_only,
            allow_other: wanted.allow_other,
            profile,
            backing_id: 0,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        };
        let server = Arc::new(FileServer::new(disk, &options));
        let shared = Arc::clone(&server);
        let thread = std::thread::spawn(move || serve(&device, &shared));
        Served { mount: Some(mount), server, path, thread: Some(thread), _directory: directory }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(mut mount) = self.mount.take() {
            mount.unmount(Unmount::Force).expect("unmount");
        }
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server ends without a panic");
        }
    }
}

/// Serves until the mount is gone.
fn serve(device: &std::os::fd::OwnedFd, server: &FileServer) {
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    let profile = *server.profile();
    let mut frame = vec![0; profile.request_bytes_max()];
    let data = IoBuf::new(profile.transfer_bytes() as usize, 4096);
    let mut out = ReplyBuf::new();
    loop {
        let mut descriptors = [PollFd::new(device, PollFlags::IN)];
        poll(&mut descriptors, None).expect("poll");
        let received = match rustix::io::read(device, &mut frame) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => continue,
            Err(Errno::NODEV | Errno::CONNABORTED) => return,
            Err(errno) => panic!("read: {errno}"),
        };
        let head = &frame[..received.min(REQUEST_HEAD_BYTES)];
        let request = Request::parse(head, received).expect("the kernel's frames are good");
        let unique = request.header.unique;
        let reply = match request.operation {
            Operation::Init(init) => {
                let answer = negotiate(&init, &profile).expect("a kernel that is new enough");
                let InitAnswer::Ready(body, _) = answer else { panic!("{answer:?}") };
                out.set_body(unique, &body);
                out.as_bytes().to_vec()
            }
            Operation::Read(argument) => {
                let read = server.read(&ring, argument.offset, argument.size, &data);
                match runtime.block_on(read) {
                    Ok(len) => {
                        let mut reply = data_header(unique, len).to_vec();
                        reply.extend(data.slice(0..len).to_vec());
                        reply
                    }
                    Err(errno) => {
                        out.set_error(unique, errno);
                        out.as_bytes().to_vec()
                    }
                }
            }
            Operation::Write(argument) => {
                let len = argument.size as usize;
                let content = data.slice(0..len);
                content.copy_from_slice(0, &frame[WRITE_DATA_OFFSET..received]);
                match runtime.block_on(server.write(&ring, &argument, &content)) {
                    Ok(written) => out.set_written(unique, written),
                    Err(errno) => out.set_error(unique, errno),
                }
                out.as_bytes().to_vec()
            }
            _ => {
                runtime.block_on(server.serve_control(&ring, &request, &mut out));
                out.as_bytes().to_vec()
            }
        };
        if !reply.is_empty() {
            match rustix::io::write(device, &reply) {
                // ENOENT: the caller was killed. ENODEV: the mount is gone.
                Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
                Err(errno) => panic!("reply to {request:?}: {errno}"),
            }
        }
    }
}

/// Root and `/dev/fuse` are needed; else the test is noted as skipped.
#[track_caller]
pub fn can_mount() -> bool {
    needs_root() && needs("/dev/fuse", Path::new("/dev/fuse").exists())
}

/// A second descriptor of the connection.
pub fn another(mount: &Mount) -> std::os::fd::OwnedFd {
    clone_device(mount.device()).expect("clone")
}
