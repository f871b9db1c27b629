//! Entries: their memory, and the commands that name them.

use std::rc::Rc;

use ringdisk_fuse::abi::uring::{COMMIT_ID, HEADER_BYTES, OP_IN, OP_IN_BYTES, PAYLOAD_SIZE};
use ringdisk_fuse::abi::{IN_HEADER_BYTES, InHeader, WriteIn, opcode};
use ringdisk_fuse::request::Request;
use std::sync::Arc;

use ringdisk_ring::{Errno, IoBuf, RawCommand, SharedMemory};
use zerocopy::FromBytes;

use crate::kernel_orders::wire::{ADD_BUFPOOL, ADD_QUEUE, COMMIT_AND_FETCH, REGISTER, Sent, Wire};

/// Where an entry of a queue with a pool is told which buffer it has (u32).
const POOL_OFFSET: usize = 276;

/// A header, and the payload or the pool in which its payloads are.
#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) queue: u16,
    pub(crate) header: IoBuf,
    pub(crate) memory: IoBuf,
    pub(crate) in_pool: Option<usize>,
    /// `fixed_buffer` of its commands.
    pub(crate) fixed_buffer: Option<u16>,
    /// Its last command.
    pub(crate) sent: Sent,
}

/// What goes back.
pub(crate) struct Reply {
    pub(crate) header: [u8; 16],
    pub(crate) payload_len: usize,
    /// FORGET and the like have no reply.
    pub(crate) is_wanted: bool,
}

/// The pool of a queue.
#[derive(Clone)]
pub(crate) struct Pool {
    /// What `memory` is a part of.
    pub(crate) region: Arc<SharedMemory>,
    pub(crate) memory: IoBuf,
    pub(crate) len: u32,
    pub(crate) flags: u64,
    pub(crate) reserved: u32,
}

/// A REGISTER, right unless a test changes it.
pub(crate) struct Register {
    pub(crate) queue: u16,
    /// (address, length) of the header and of the payload.
    pub(crate) vectors: [(u64, u64); 2],
    pub(crate) count: u32,
    /// Address of the vectors, instead of memory that holds them.
    pub(crate) address: Option<u64>,
    /// Index for pages of the client, on a queue for zero-copy.
    pub(crate) slot: u16,
    pub(crate) fixed_buffer: Option<u16>,
}

/// Memory that the kernel may be given: it is never freed.
pub(crate) fn leaked(len: usize) -> IoBuf {
    let memory = IoBuf::new(len, 4096);
    std::mem::forget(memory.clone());
    memory
}

impl Entry {
    fn word(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        self.header.copy_to_slice(at, &mut bytes);
        u32::from_ne_bytes(bytes)
    }

    pub(crate) fn commit_id(&self) -> u64 {
        let mut bytes = [0; 8];
        self.header.copy_to_slice(COMMIT_ID, &mut bytes);
        u64::from_ne_bytes(bytes)
    }

    /// The request that the kernel has put in.
    pub(crate) fn request(&self) -> Request {
        let (mut head, mut arguments) = ([0; IN_HEADER_BYTES], [0; OP_IN_BYTES]);
        self.header.copy_to_slice(0, &mut head);
        self.header.copy_to_slice(OP_IN, &mut arguments);
        let header = InHeader::read_from_bytes(&head).expect("40 bytes");
        let len = match header.opcode {
            opcode::WRITE => size_of::<WriteIn>() + self.word(PAYLOAD_SIZE) as usize,
            _ => OP_IN_BYTES,
        };
        Request::from_parts(header, &arguments, len).expect("a good request")
    }

    /// Where the payload is: of its own, or the buffer of the pool that the kernel has chosen.
    pub(crate) fn payload(&self) -> IoBuf {
        match self.in_pool {
            None => self.memory.clone(),
            Some(len) => {
                let start = self.word(POOL_OFFSET) as usize;
                self.memory.slice(start..start + len)
            }
        }
    }

    pub(crate) fn pool_offset(&self) -> u32 {
        self.word(POOL_OFFSET)
    }

    pub(crate) fn put(&self, reply: &Reply) {
        let len = u32::try_from(reply.payload_len).expect("1 MiB at most");
        self.header.copy_from_slice(0, &reply.header);
        self.header.copy_from_slice(PAYLOAD_SIZE, &len.to_ne_bytes());
    }
}

impl Register {
    pub(crate) fn of(queue: u16, entry: &Entry) -> Register {
        let payload = match entry.in_pool {
            Some(_) => (0, 0),
            None => (entry.memory.address() as u64, entry.memory.len() as u64),
        };
        let header = (entry.header.address() as u64, HEADER_BYTES as u64);
        let fixed_buffer = entry.fixed_buffer;
        Register {
            queue,
            vectors: [header, payload],
            count: 2,
            address: None,
            slot: 0,
            fixed_buffer,
        }
    }
}

impl Wire {
    /// An entry with a payload of its own.
    pub(crate) fn new_entry(&self) -> Entry {
        Entry {
            queue: 0,
            header: leaked(4096),
            memory: leaked(self.payload_bytes),
            in_pool: None,
            fixed_buffer: None,
            sent: Sent::default(),
        }
    }

    /// An entry whose payloads are in a pool.
    pub(crate) fn new_entry_of(&self, pool: &Pool) -> Entry {
        let in_pool = Some(self.payload_bytes);
        Entry { memory: pool.memory.clone(), in_pool, ..self.new_entry() }
    }

    pub(crate) fn register_command(&self, register: &Register) -> RawCommand {
        let words = register.vectors.iter().flat_map(|(address, len)| [*address, *len]);
        let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
        let vectors = leaked(bytes.len());
        vectors.copy_from_slice(0, &bytes);
        let mut area = area(0, 0, register.queue);
        area[24..26].copy_from_slice(&register.slot.to_ne_bytes());
        RawCommand {
            address: register.address.unwrap_or(vectors.address() as u64),
            len: register.count,
            fixed_buffer: register.fixed_buffer,
            ..self.command(REGISTER, area)
        }
    }

    /// Gives an entry to the kernel; [`Wire::turn`] serves it from now on. Returns its index.
    pub(crate) fn register(&mut self, queue: u16, mut entry: Entry) -> usize {
        let command = self.register_command(&Register::of(queue, &entry));
        entry.queue = queue;
        entry.sent = self.send(command);
        self.entries.push(entry);
        self.entries.len() - 1
    }

    pub(crate) fn commit_command(&self, queue: u16, commit_id: u64) -> RawCommand {
        self.command(COMMIT_AND_FETCH, area(0, commit_id, queue))
    }

    /// Commits the reply in an entry.
    pub(crate) fn commit_entry(&mut self, index: usize) {
        let Entry { queue, fixed_buffer, .. } = self.entries[index];
        let command = self.commit_command(queue, self.entries[index].commit_id());
        self.entries[index].sent = Sent::default();
        let sent = self.send(RawCommand { fixed_buffer, ..command });
        self.entries[index].sent = Rc::clone(&sent);
    }

    pub(crate) fn add_queue(&mut self, queue: u16, flags: u64) -> Result<u32, Errno> {
        let command = self.command(ADD_QUEUE, area(flags, 0, queue));
        self.result(command)
    }

    /// [`Wire::payload_bytes`] as the kernel's structures have it.
    pub(crate) fn payload_len(&self) -> u32 {
        u32::try_from(self.payload_bytes).expect("1 MiB at most")
    }

    /// A pool of `buffers` payloads, not given to the kernel yet.
    pub(crate) fn new_pool(&self, buffers: usize) -> Pool {
        let region = SharedMemory::new(buffers * self.payload_bytes, 4096);
        // The kernel may be given it: it is never freed.
        std::mem::forget(Arc::clone(&region));
        let memory = region.buffer();
        let len = u32::try_from(memory.len()).expect("small");
        Pool { region, memory, len, flags: 0, reserved: 0 }
    }

    pub(crate) fn add_pool(
        &mut self,
        queue: u16,
        pool: &Pool,
        fixed_buffer: Option<u16>,
    ) -> Result<u32, Errno> {
        let mut area = area(pool.flags, 0, queue);
        area[24..32].copy_from_slice(&(pool.memory.address() as u64).to_ne_bytes());
        area[32..36].copy_from_slice(&pool.len.to_ne_bytes());
        area[36..40].copy_from_slice(&pool.reserved.to_ne_bytes());
        let command = RawCommand { fixed_buffer, ..self.command(ADD_BUFPOOL, area) };
        self.result(command)
    }
}

/// The command area of a submission entry.
pub(crate) fn area(flags: u64, commit_id: u64, queue: u16) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[0..8].copy_from_slice(&flags.to_ne_bytes());
    bytes[8..16].copy_from_slice(&commit_id.to_ne_bytes());
    bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
    bytes
}
