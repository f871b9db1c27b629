//! Serves a disk image over a Unix socket: the smallest complete export.
//!
//! Start: `cargo run -p ringdisk-export --example socket -- IMAGE SOCKET`; the end of the input
//! ends it. docs/adding-an-export.md walks through this file.
//!
//! The protocol. A request has 16 bytes: what is asked for (`R`ead, `W`rite, `F`lush, `S`ize),
//! three of 0, the length (4) and the offset (8), then the data of a write. A reply has 8 bytes: an
//! errno or 0 (4), the length of the data (4), then the data. All numbers are little-endian.

use std::cell::RefCell;
use std::error::Error as StdError;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::{Disk, HandOver, ImageOptions, Source};
use ringdisk_export::stats::{QueueCells, Stats};
use ringdisk_export::{
    Admission, Error, ErrorKind, HaltReason, PlacementRule, QueueThread, QueueWork, Running,
    ThreadOptions, ThreadSetup, ask_all, close_disk, place_threads, stop_threads,
};
use ringdisk_ring::{Config, Errno, Fd, IoBuf, Op, POLL_IN, Ring, Runtime, SetupError, Topology};

/// How long requests in flight have at the end and at a hand-over (10 s).
const IN_FLIGHT_LIMIT: Duration = Duration::from_secs(10);
/// Largest read and write, bytes: what a connection has memory for.
const DATA_BYTES_MAX: usize = 1 << 20;
/// Clients of a queue thread at once; further ones wait. 64 have 64 MiB of memory.
pub const CLIENTS_MAX: usize = 64;
/// Pause of a thread that can take no client: it has as many as it may, or no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Where the data are in that memory: a page boundary, so that direct I/O needs no copy.
const DATA_AT: usize = 4096;

/// A listening socket, and those of clients that are connected.
pub type Sockets = (OwnedFd, Vec<OwnedFd>);

/// A disk that is being served, as its control thread sees it.
#[derive(Debug)]
pub struct Export(Vec<QueueThread<Work>>);

impl Export {
    /// Serves clients. What was handed over goes on so: open its disk with
    /// [`Disk::open_handed`], then call [`Disk::take_charge`], then this.
    pub fn start(disk: Arc<Disk>, sockets: Sockets, o: &ThreadOptions) -> Result<Export, Error> {
        let (listener, clients) = sockets;
        let (rule, mut warnings, mut threads) = (PlacementRule::default(), Vec::new(), Vec::new());
        let places = place_threads(&Topology::read(), o, &rule, &mut warnings)?;
        // Of several threads that are woken for a client, all but one find none.
        rustix::io::ioctl_fionbio(&listener, true).map_err(|e| failed(e.into()))?;
        for (number, cpus) in places.threads.into_iter().enumerate() {
            let ring = Config { name: format!("socket-{number}"), ..Config::default() };
            let listener = listener.try_clone().map_err(failed)?;
            let work = Work(Arc::clone(&disk), Some(listener));
            let thread = QueueThread::start(ThreadSetup { number, cpus, ring }, work);
            threads.push(thread.map_err(Error::of_ring)?.0);
        }
        let unbound = threads.iter().filter_map(|thread| thread.pin_error.as_ref());
        warnings.iter().chain(unbound).for_each(|warning| eprintln!("warning: {warning}"));
        for (client, thread) in clients.into_iter().zip(threads.iter().cycle()) {
            let _ = thread.ask(|queue| queue.serve(client));
        }
        Ok(Export(threads))
    }

    /// Answers what is in flight, and gives all to a successor. Ends the export, also on errors.
    pub fn hand_over(mut self) -> Result<(HandOver, Sockets), Error> {
        self.hold()?;
        let hand_over = async |queue: Rc<Queue>| queue.disk.hand_over(&queue.ring).await;
        let disk = self.0[0].ask_task(hand_over).within(IN_FLIGHT_LIMIT)?;
        let refused = |error| Error::new(ErrorKind::Refused, "handing over").source(error);
        let listener = self.0[0].ask(|queue| queue.listener.try_clone()).within(IN_FLIGHT_LIMIT)?;
        let (listener, mut clients) = (listener.map_err(failed)?, Vec::new());
        let duplicate = async |queue: Rc<Queue>| {
            let clients = queue.clients.borrow();
            clients.iter().map(|client| client.try_clone()).collect::<Result<Vec<_>, _>>()
        };
        for some in ask_all(&self.0, IN_FLIGHT_LIMIT, duplicate)? {
            clients.extend(some.map_err(failed)?);
        }
        stop_threads(&mut self.0, IN_FLIGHT_LIMIT, "socket");
        Ok((disk.map_err(refused)?, (listener, clients)))
    }

    /// Answers what is in flight, and makes durable what was written.
    pub fn stop(mut self) -> Result<Stats, HaltReason> {
        let drained = self.hold().is_ok();
        let close =
            async move |queue: Rc<Queue>| close_disk(&queue.disk, &queue.ring, drained).await;
        let closed = self.0[0].ask_task(close).within(IN_FLIGHT_LIMIT);
        stop_threads(&mut self.0, IN_FLIGHT_LIMIT, "socket");
        closed?.map_err(HaltReason::Flush)?;
        Ok(Stats::of(&self.0.iter().map(|thread| thread.view.clone()).collect::<Vec<_>>()))
    }

    /// No thread takes a request any more, and none is in flight.
    fn hold(&self) -> Result<(), Error> {
        let hold = async |queue: Rc<Queue>| queue.admission.hold(&queue.ring).await;
        ask_all(&self.0, IN_FLIGHT_LIMIT, hold).map(|_| ())
    }
}

fn failed(error: std::io::Error) -> Error {
    Error::new(ErrorKind::System, "a socket cannot be used").source(error)
}

/// What runs on a queue thread.
struct Work(Arc<Disk>, Option<OwnedFd>);

/// What a queue thread has for itself.
struct Queue {
    ring: Ring,
    disk: Arc<Disk>,
    cells: Arc<QueueCells>,
    listener: OwnedFd,
    admission: Admission,
    clients: RefCell<Vec<Rc<OwnedFd>>>,
}

impl QueueWork for Work {
    type Shared = ();
    type Local = Queue;

    fn run(&mut self, thread: &mut Running<Work>) -> Result<(), SetupError> {
        let (ring, cells) = (thread.ring().clone(), Arc::clone(thread.cells()));
        let (disk, Some(listener)) = (Arc::clone(&self.0), self.1.take()) else { return Ok(()) };
        let (admission, clients) = (Admission::default(), RefCell::default());
        let queue = Rc::new(Queue { ring, disk, cells, listener, admission, clients });
        thread.ring().spawn(accept(Rc::clone(&queue)));
        thread.ready((), queue);
        thread.until_stopped(|| {});
        Ok(())
    }

    fn panicked(&self) {
        eprintln!("a queue thread panicked: its connections are closed");
    }
}

impl Queue {
    /// Serves a client, as a task of this thread. Its end, or what is no request, ends that.
    fn serve(self: &Rc<Queue>, client: OwnedFd) {
        let (queue, client) = (Rc::clone(self), Rc::new(client));
        self.clients.borrow_mut().push(Rc::clone(&client));
        self.ring.spawn(async move {
            let _ = converse(&queue, &client).await;
            queue.clients.borrow_mut().retain(|other| !Rc::ptr_eq(other, &client));
        });
    }

    /// Carries out a request. Gives the bytes of data for the reply, which are in `data`.
    async fn answer(&self, what: u8, offset: u64, data: &IoBuf) -> Result<usize, Errno> {
        match what {
            b'R' => self.disk.read(&self.ring, offset, data).await,
            b'W' => match self.disk.write(&self.ring, offset, data).await? {
                written if written == data.len() => Ok(0),
                _ => Err(Errno::NOSPC),
            },
            b'F' => self.disk.flush(&self.ring).await.map(|()| 0),
            b'S' if data.len() == size_of::<u64>() => {
                data.copy_from_slice(0, &self.disk.size().0.to_le_bytes());
                Ok(data.len())
            }
            _ => Err(Errno::INVAL),
        }
    }
}

/// Takes clients. A task of each thread: of those that are woken, one gets the client.
async fn accept(queue: Rc<Queue>) {
    while queue.ring.poll(Fd::of(&queue.listener), POLL_IN).await.is_ok() {
        queue.admission.admit(&queue.ring).await;
        let is_full = queue.clients.borrow().len() >= CLIENTS_MAX;
        let client = if is_full { Err(Errno::MFILE) } else { rustix::net::accept(&queue.listener) };
        let taken = client.map(|client| queue.serve(client));
        queue.admission.end(&queue.ring);
        // The next poll would end at once, since the client waits.
        if taken.is_err_and(|errno| errno != Errno::AGAIN) {
            queue.ring.sleep(ACCEPT_PAUSE).await;
        }
    }
}

/// The life of a connection: one request after the other.
async fn converse(queue: &Queue, client: &OwnedFd) -> Result<(), Errno> {
    let memory = IoBuf::new(DATA_AT + DATA_BYTES_MAX, DATA_AT);
    loop {
        // Nothing is read of a request that is not admitted: the successor finds all of it.
        queue.ring.poll(Fd::of(client), POLL_IN).await?;
        queue.admission.admit(&queue.ring).await;
        queue.cells.begin();
        let begun = Instant::now();
        let served = serve_one(queue, Fd::of(client), &memory).await;
        queue.cells.end_since(begun);
        queue.admission.end(&queue.ring);
        served?;
    }
}

/// One request, from its first byte to the last of its reply.
async fn serve_one(queue: &Queue, client: Fd, memory: &IoBuf) -> Result<(), Errno> {
    let (mut head, read) = ([0; 16], |buf: &IoBuf| queue.ring.read(client, 0, buf));
    whole(&memory.slice(0..head.len()), read).await?;
    memory.copy_to_slice(0, &mut head);
    let [what, 0, 0, 0, l0, l1, l2, l3, offset @ ..] = head else { return Err(Errno::PROTO) };
    let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    (len <= DATA_BYTES_MAX).then_some(()).ok_or(Errno::PROTO)?;
    let data = memory.slice(DATA_AT..DATA_AT + len);
    if what == b'W' {
        whole(&data, read).await?;
    }
    let (errno, len) = match queue.answer(what, u64::from_le_bytes(offset), &data).await {
        Ok(len) => (0, len),
        Err(errno) => (errno.raw_os_error(), 0),
    };
    queue.cells.errors.add(u64::from(errno != 0));
    // The reply ends where the data begin: one write for both.
    memory.copy_from_slice(DATA_AT - 8, &errno.to_le_bytes());
    memory.copy_from_slice(DATA_AT - 4, &u32::try_from(len).unwrap_or(0).to_le_bytes());
    whole(&memory.slice(DATA_AT - 8..DATA_AT + len), |buf| queue.ring.write(client, 0, buf)).await
}

/// Repeats an operation on a socket until all bytes are through.
async fn whole(buf: &IoBuf, operation: impl Fn(&IoBuf) -> Op) -> Result<(), Errno> {
    let mut done = 0;
    while done < buf.len() {
        match operation(&buf.slice(done..buf.len())).await? {
            0 => return Err(Errno::PIPE),
            moved => done += moved as usize,
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn StdError>> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(image), Some(socket)) = (arguments.next(), arguments.next()) else {
        return Err("usage: socket IMAGE SOCKET".into());
    };
    let mut runtime = Runtime::new(Config::default())?;
    let (ring, image) = (runtime.ring().clone(), Source::Path(image.into()));
    let disk = runtime.block_on(Disk::open(&ring, image, &ImageOptions::default()))?;
    let sockets = (UnixListener::bind(socket)?.into(), Vec::new());
    let export = Export::start(disk, sockets, &ThreadOptions::default())?;
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    println!("{} requests", export.stop()?.total().requests);
    Ok(())
}
