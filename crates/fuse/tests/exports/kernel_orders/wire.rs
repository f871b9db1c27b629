//! One FUSE connection in the hands of a test: a real mount whose every command is given by hand.
//!
//! One thread, one ring. Nothing is served unless [`Wire::turn`] runs, so a test decides what the
//! kernel sees, and when. Memory that the kernel was given is never freed: it may write to an entry
//! until long after its ring is closed.
//!
//! Source: include/uapi/linux/fuse.h (BSD-2-Clause), `struct fuse_uring_cmd_req`, `struct
//! fuse_uring_req_header`.

use std::cell::Cell;
use std::fs::File;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_fuse::abi::InitIn;
use ringdisk_fuse::abi::flags::{INIT_EXT, INIT_HAS_IO_URING_BUFPOOL, INIT_OVER_IO_URING};
use ringdisk_fuse::file::{FileOptions, FileServer};
use ringdisk_fuse::mount::{Method, Mount, MountOptions, Unmount, mount};
use ringdisk_fuse::negotiate::{InitAnswer, Profile, negotiate};
use ringdisk_fuse::reply::ReplyBuf;
use ringdisk_fuse::request::Operation;
use ringdisk_ring::{Config, Errno, Fd, RawCommand, Ring, Runtime, Topology};
use ringdisk_testkit::connection::waiting;
use ringdisk_testkit::limits::{UringParameter, needs_root};
use ringdisk_testkit::process::patient;

use crate::kernel_orders::entry::Entry;

pub(crate) const REGISTER: u32 = 1;
pub(crate) const COMMIT_AND_FETCH: u32 = 2;
pub(crate) const ADD_QUEUE: u32 = 3;
pub(crate) const ADD_BUFPOOL: u32 = 4;

/// How long something may take that has to happen.
pub(crate) const COMPLETES: Duration = Duration::from_secs(5);
/// How long something is watched that must not happen: the same on slow machines, where it says
/// less.
pub(crate) const PENDS: Duration = Duration::from_millis(100);

/// How a command ended; `None` while the kernel has it.
pub(crate) type Sent = Rc<Cell<Option<Result<u32, Errno>>>>;

pub(crate) struct Wire {
    mount: Option<Mount>,
    pub(crate) runtime: Runtime,
    pub(crate) ring: Ring,
    pub(crate) server: FileServer,
    init: (u64, InitIn),
    /// Bytes of a payload: the least that REGISTER takes with what is negotiated here.
    pub(crate) payload_bytes: usize,
    /// Entries that the kernel has: their requests are served by [`Wire::turn`].
    pub(crate) entries: Vec<Entry>,
    pub(crate) path: PathBuf,
    directory: Option<tempfile::TempDir>,
    switch: Option<UringParameter>,
}

impl Wire {
    /// A mount whose INIT has arrived and is not answered. `None`, with a word about it, where that
    /// cannot be had.
    pub(crate) fn mounted() -> Option<Wire> {
        if !needs_root() {
            return None;
        }
        let switch = UringParameter::set(true)?;
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk");
        File::create(&path).expect("a mountpoint");
        let profile = Profile { over_io_uring: true, ..Profile::detect(false) };
        let options = MountOptions {
            source: "kernel-orders".into(),
            read_only: false,
            allow_other: false,
            max_read: profile.transfer_bytes(),
            method: Method::Direct,
        };
        let mount = mount(&path, &options).expect("a mount");
        let disk = Disk::null(&NullOptions {
            size: Bytes(1 << 20),
            read_zeroes: true,
            ..NullOptions::default()
        });
        let options = FileOptions {
            growable: false,
            resizable: false,
            read_only: false,
            allow_other: false,
            profile,
            backing_id: 0,
            uid: 0,
            gid: 0,
        };
        let runtime = Runtime::new(Config { sqe128: true, ..Config::default() }).expect("a ring");
        let mut wire = Wire {
            mount: Some(mount),
            ring: runtime.ring().clone(),
            runtime,
            server: FileServer::new(disk, &options),
            init: (0, InitIn::default()),
            payload_bytes: profile.transfer_bytes() as usize,
            entries: Vec::new(),
            path,
            directory: Some(directory),
            switch: Some(switch),
        };
        let (request, _) = wire.wait(COMPLETES, Wire::receive).expect("INIT comes with the mount");
        let Operation::Init(init) = request.operation else { panic!("{request:?}") };
        wire.init = (request.header.unique, init);
        Some(wire)
    }

    /// A mount on which io_uring is agreed, and nothing else done.
    pub(crate) fn negotiated() -> Option<Wire> {
        let wire = Wire::mounted()?;
        wire.answer_init(true);
        Some(wire)
    }

    /// A mount that is live: `per_queue` entries in each queue.
    pub(crate) fn live(per_queue: usize) -> Option<Wire> {
        let mut wire = Wire::negotiated()?;
        for queue in 0..possible_cpus() {
            for _ in 0..per_queue {
                let entry = wire.new_entry();
                wire.register(queue, entry);
            }
        }
        Some(wire)
    }

    pub(crate) fn answer_init(&self, over_io_uring: bool) {
        let profile = Profile { over_io_uring, ..*self.server.profile() };
        let Ok(InitAnswer::Ready(body, _)) = negotiate(&self.init.1, &profile) else {
            panic!("{:?}", self.init)
        };
        let mut reply = ReplyBuf::new();
        reply.set_body(self.init.0, &body);
        rustix::io::write(self.mount().device(), reply.as_bytes()).expect("INIT is answered");
    }

    pub(crate) fn offers(&self, flag: u64) -> bool {
        let (low, high) = (u64::from(self.init.1.flags), u64::from(self.init.1.flags2));
        assert!(low & INIT_EXT != 0 && high << 32 & INIT_OVER_IO_URING != 0, "{:?}", self.init);
        (low | high << 32) & flag != 0
    }

    /// Whether this kernel has buffer pools, and so is Linux 7.3 or newer: it is stricter in other
    /// places too.
    pub(crate) fn has_pools(&self) -> bool {
        self.offers(INIT_HAS_IO_URING_BUFPOOL)
    }

    pub(crate) fn mount(&self) -> &Mount {
        self.mount.as_ref().expect("mounted")
    }

    /// Sends any command to any FUSE descriptor.
    pub(crate) fn send(&self, command: RawCommand) -> Sent {
        let sent = Sent::default();
        let (ring, told) = (self.ring.clone(), Rc::clone(&sent));
        self.ring.spawn(async move {
            // SAFETY: memory that these tests name in a command is leaked, or is no memory at all.
            let result = unsafe { ring.command(&command) }.await;
            told.set(Some(result));
        });
        sent
    }

    /// A command on this mount.
    pub(crate) fn command(&self, operation: u32, area: [u8; 80]) -> RawCommand {
        let fd = Fd::of(&self.mount().device());
        RawCommand { fd, operation, address: 0, len: 0, fixed_buffer: None, command: area }
    }

    /// Sends a command and waits for its end.
    pub(crate) fn result(&mut self, command: RawCommand) -> Result<u32, Errno> {
        let sent = self.send(command);
        self.end_of(&sent)
    }

    pub(crate) fn end_of(&mut self, sent: &Sent) -> Result<u32, Errno> {
        self.wait(COMPLETES, |_| sent.get()).expect("the command completes")
    }

    /// The kernel keeps a command: it is an entry that waits for requests.
    pub(crate) fn pends(&mut self, sent: &Sent) -> bool {
        self.watch(PENDS, |_| sent.get()).is_none()
    }

    /// Runs the ring, and nothing else, until `found` gives something; patiently.
    pub(crate) fn wait<T>(
        &mut self,
        limit: Duration,
        found: impl FnMut(&mut Wire) -> Option<T>,
    ) -> Option<T> {
        self.watch(patient(limit), found)
    }

    /// The same for exactly this time at most.
    pub(crate) fn watch<T>(
        &mut self,
        limit: Duration,
        mut found: impl FnMut(&mut Wire) -> Option<T>,
    ) -> Option<T> {
        let end = Instant::now() + limit;
        loop {
            let value = found(self);
            if value.is_some() || Instant::now() > end {
                return value;
            }
            let ring = self.ring.clone();
            self.runtime.block_on(ring.sleep(Duration::from_micros(500)));
        }
    }

    /// Runs the ring until so many requests are with the kernel or with us.
    pub(crate) fn wait_for_requests(&mut self, count: u32) {
        let connection = self.mount().connection().expect("a mount that was seen");
        let seen = self.wait(COMPLETES, |_| {
            let now = waiting(connection).expect("the connection is there");
            (now >= count).then_some(())
        });
        assert_eq!(seen, Some(()), "not so many requests");
    }

    /// Takes what is more than this thread's out, so that it outlives the ring.
    pub(crate) fn take_apart(&mut self) -> (Mount, tempfile::TempDir, UringParameter) {
        let parts = (self.mount.take(), self.directory.take(), self.switch.take());
        let (Some(mount), Some(directory), Some(switch)) = parts else { panic!("taken twice") };
        (mount, directory, switch)
    }

    /// Ends the mount while the ring still runs: an unmount waits for what the kernel owes the
    /// ring, so no ring thread may call it.
    pub(crate) fn unmount(&mut self) {
        let Some(mut mount) = self.mount.take() else { return };
        let thread = std::thread::spawn(move || mount.unmount(Unmount::Force));
        self.wait(COMPLETES, |_| thread.is_finished().then_some(()));
        let _ = thread.join();
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// Queues that the kernel has.
pub(crate) fn possible_cpus() -> u16 {
    u16::try_from(Topology::read().possible.len()).expect("fewer than 65,536")
}
