//! Clients of a mount, and serving them: over `/dev/fuse`, in entries, or not.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use ringdisk_fuse::abi::REQUEST_HEAD_BYTES;
use ringdisk_fuse::reply::{ReplyBuf, data_header};
use ringdisk_fuse::request::{Operation, Request};
use ringdisk_ring::{CpuList, IoBuf, Topology, pin_to_cpus};

use crate::kernel_orders::entry::Reply;
use crate::kernel_orders::wire::{COMPLETES, PENDS, Wire};

/// What a client got.
pub(crate) type Got = std::io::Result<Vec<u8>>;

impl Wire {
    /// A request on `/dev/fuse`, and the frame it came in.
    pub(crate) fn receive(&mut self) -> Option<(Request, Vec<u8>)> {
        let mut frame = vec![0; self.server.profile().request_bytes_max()];
        match rustix::io::read(self.mount().device(), &mut frame[..]) {
            Ok(received) => {
                frame.truncate(received);
                let head = &frame[..received.min(REQUEST_HEAD_BYTES)];
                Some((Request::parse(head, received).expect("a good frame"), frame))
            }
            Err(_) => None,
        }
    }

    /// Serves what is there, on `/dev/fuse` and in the entries. Returns how many requests came in
    /// each way.
    pub(crate) fn turn(&mut self) -> (usize, usize) {
        let by_device = self.turn_device();
        let ready: Vec<usize> =
            (0..self.entries.len()).filter(|index| self.is_full(*index)).collect();
        for index in &ready {
            self.serve_entry(*index);
        }
        (by_device, ready.len())
    }

    /// Serves what is there on `/dev/fuse`. Returns how many requests that were.
    pub(crate) fn turn_device(&mut self) -> usize {
        let mut count = 0;
        while let Some((request, _)) = self.receive() {
            count += 1;
            let payload = IoBuf::new(self.payload_bytes, 4096);
            let reply = self.answer(&request, &payload);
            let mut bytes = reply.header.to_vec();
            bytes.extend(payload.slice(0..reply.payload_len).to_vec());
            if reply.is_wanted {
                // ENOENT: the caller is gone.
                let _ = rustix::io::write(self.mount().device(), &bytes);
            }
        }
        count
    }

    /// A request is in the entry.
    pub(crate) fn is_full(&self, index: usize) -> bool {
        matches!(self.entries[index].sent.get(), Some(Ok(_)))
    }

    /// Serves until a READ is in an entry, and leaves that there.
    pub(crate) fn hold_a_read(&mut self) -> usize {
        let held = self.wait(COMPLETES, |wire| {
            wire.turn_device();
            for index in 0..wire.entries.len() {
                if !wire.is_full(index) {
                    continue;
                }
                if matches!(wire.entries[index].request().operation, Operation::Read(_)) {
                    return Some(index);
                }
                wire.serve_entry(index);
            }
            None
        });
        held.expect("a READ comes")
    }

    /// Serves until a client has ended.
    pub(crate) fn finish(&mut self, client: &Receiver<Got>) -> Got {
        let got = self.wait(COMPLETES, |wire| {
            wire.turn();
            client.try_recv().ok()
        });
        got.expect("the client is served")
    }

    /// Serves what a client leaves behind when it has ended (RELEASE), until nothing comes any
    /// more.
    pub(crate) fn settle(&mut self) {
        let mut quiet = Instant::now();
        self.wait(COMPLETES, |wire| {
            if wire.turn() != (0, 0) {
                quiet = Instant::now();
            }
            (quiet.elapsed() > PENDS).then_some(())
        });
    }

    /// The client still waits, although the ring runs.
    pub(crate) fn waits(&mut self, client: &Receiver<Got>) -> bool {
        self.watch(PENDS, |_| client.try_recv().ok()).is_none()
    }

    /// Serves the request in an entry, and commits.
    pub(crate) fn serve_entry(&mut self, index: usize) {
        let entry = self.entries[index].clone();
        let request = entry.request();
        let payload = entry.payload();
        let reply = self.answer(&request, &payload);
        entry.put(&reply);
        self.commit_entry(index);
    }

    /// Carries a request out. The body of the reply is in `payload` afterwards.
    pub(crate) fn answer(&mut self, request: &Request, payload: &IoBuf) -> Reply {
        let unique = request.header.unique;
        let ring = self.ring.clone();
        if let Operation::Read(read) = request.operation {
            let done = self.server.read(&ring, read.offset, read.size, payload);
            let len = self.runtime.block_on(done).expect("a disk without errors");
            return Reply { header: data_header(unique, len), payload_len: len, is_wanted: true };
        }
        let mut out = ReplyBuf::new();
        match request.operation {
            Operation::Write(write) => out.set_written(unique, write.size as usize),
            _ => self.runtime.block_on(self.server.serve_control(&ring, request, &mut out)),
        }
        payload.copy_from_slice(0, out.body());
        let mut header = [0; 16];
        let is_wanted = !out.is_empty();
        if is_wanted {
            header.copy_from_slice(&out.as_bytes()[..16]);
        }
        Reply { header, payload_len: out.body().len(), is_wanted }
    }

    /// A client that opens the file and reads `len` bytes of its start; nothing serves it unless
    /// the test does.
    pub(crate) fn client(&self, len: usize) -> Receiver<Got> {
        self.client_on(Topology::read().allowed, len)
    }

    /// The same, on one of these CPUs: that decides the queue.
    pub(crate) fn client_on(&self, cpus: CpuList, len: usize) -> Receiver<Got> {
        let (sender, receiver) = channel();
        let path = self.path.clone();
        std::thread::spawn(move || {
            pin_to_cpus(&cpus).expect("CPUs of ours");
            let mut bytes = vec![1; len];
            let got = File::open(path).and_then(|file| file.read_exact_at(&mut bytes, 0));
            // Nobody listens any more when a test has failed.
            let _ = sender.send(got.map(|()| bytes));
        });
        receiver
    }

    /// Serves until a client has what it wants: what it got, and how many requests came over
    /// `/dev/fuse` and by entries.
    pub(crate) fn serve_client(&mut self, len: usize) -> (Got, usize, usize) {
        let client = self.client(len);
        let (mut classic, mut rings) = (0, 0);
        let got = self.wait(COMPLETES, |wire| {
            let (by_device, by_entry) = wire.turn();
            classic += by_device;
            rings += by_entry;
            client.try_recv().ok()
        });
        (got.expect("the client is served"), classic, rings)
    }
}
