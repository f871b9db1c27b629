use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::Gone;

/// What a queue of these tests does once it is ready.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    Serve,
    Panic,
    Hang,
    Fail,
}

/// Reports its end: after its ring is closed.
struct Reporting {
    then: Then,
    events: Sender<&'static str>,
    /// A queue that hangs does so until the other end of this is dropped.
    held: Option<Receiver<()>>,
}

impl QueueWork for Reporting {
    type Shared = u32;
    type Local = String;

    fn run(&mut self, thread: &mut Running<Reporting>) -> Result<(), SetupError> {
        if self.then == Then::Fail {
            return Err(SetupError::Other(std::io::Error::other("not today")));
        }
        let at_close = AtDrop(self.events.clone());
        thread.ring().spawn(async move {
            let _at_close = at_close;
            std::future::pending::<()>().await;
        });
        assert!(thread.ready(7, Rc::new(String::from("local"))));
        let (then, held) = (self.then, self.held.take());
        thread.until_stopped(|| match (then, &held) {
            (Then::Panic, _) => panic!("asked to panic"),
            (Then::Hang, Some(held)) => {
                let _ = held.recv();
            }
            _ => {}
        });
        Ok(())
    }

    fn panicked(&self) {
        let _ = self.events.send("panicked");
    }
}

impl Drop for Reporting {
    fn drop(&mut self) {
        let _ = self.events.send("queue dropped");
    }
}

/// Says when the tasks of the ring are dropped.
struct AtDrop(Sender<&'static str>);

impl Drop for AtDrop {
    fn drop(&mut self) {
        let _ = self.0.send("ring closed");
    }
}

type Started = Result<(QueueThread<Reporting>, u32), SetupError>;

fn start(then: Then) -> (Started, Receiver<&'static str>) {
    start_held(then, None)
}

fn start_held(then: Then, held: Option<Receiver<()>>) -> (Started, Receiver<&'static str>) {
    let (events, received) = channel();
    let ring = Config { name: String::from("queue-test"), ..Config::default() };
    let setup = ThreadSetup { number: 3, cpus: CpuList::default(), ring };
    (QueueThread::start(setup, Reporting { then, events, held }), received)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn the_ring_is_closed_before_the_queue_is_dropped() {
    let (started, events) = start(Then::Serve);
    let (mut thread, shared) = started.expect("a thread");
    assert_eq!(shared, 7);
    thread.ask_to_stop();
    assert!(thread.join(soon(), || {}));
    assert_eq!(events.iter().collect::<Vec<_>>(), ["ring closed", "queue dropped"]);
    assert!(thread.view.snapshot(3).cpu_ns > 0);
}

#[test]
fn a_panic_is_reported_after_the_ring_is_closed() {
    let (started, events) = start(Then::Panic);
    let (mut thread, _) = started.expect("it was ready");
    assert!(thread.join(soon(), || {}));
    let seen: Vec<_> = events.iter().collect();
    assert_eq!(seen, ["ring closed", "panicked", "queue dropped"]);
}

#[test]
fn a_queue_that_cannot_be_made_is_no_thread() {
    let error = start(Then::Fail).0.expect_err("refused");
    assert!(format!("{error:?}").contains("not today"), "{error:?}");
}

#[test]
fn a_thread_that_does_not_end_in_time_is_left_behind() {
    let (let_go, held) = channel();
    let (started, _events) = start_held(Then::Hang, Some(held));
    let (mut thread, _) = started.expect("a thread");
    thread.ask_to_stop();
    assert!(!thread.join(Instant::now() + Duration::from_millis(20), || {}));
    // It is left behind only while it hangs.
    drop(let_go);
    assert!(thread.join(soon(), || {}));
}

#[test]
fn a_thread_that_cannot_be_bound_says_so_and_serves() {
    let (events, _received) = channel();
    let setup = ThreadSetup {
        number: 3,
        cpus: CpuList::of_kernel("60000"),
        ring: Config { name: String::from("queue-test"), ..Config::default() },
    };
    let (thread, _) =
        QueueThread::start(setup, Reporting { then: Then::Serve, events, held: None })
            .expect("a thread");
    let why = thread.pin_error.clone().expect("a reason");
    assert!(why.starts_with("queue thread 3 runs unbound: CPU 60000: "), "{why}");
    assert_eq!(thread.view.cpu, None);
    stop_threads(&mut [thread], Duration::from_secs(20), "test");
}

#[test]
fn a_thread_is_asked_with_what_it_has_for_itself_until_it_ends() {
    let (started, _events) = start(Then::Serve);
    let (mut thread, _) = started.expect("a thread");
    let now = thread.ask(|local| local.len());
    assert_eq!(now.wait(|| true), Ok(5));
    let later = thread.ask_task(|local| async move { local.to_uppercase() });
    assert_eq!(later.wait(|| true).as_deref(), Ok("LOCAL"));
    let never = thread.ask_task(|_| std::future::pending::<()>());
    assert_eq!(never.wait(|| false), Err(Gone));
    thread.ask_to_stop();
    assert!(thread.join(soon(), || {}));
    assert_eq!(thread.ask(|_| ()).wait(|| false), Err(Gone));
}

#[test]
fn an_answer_for_which_no_thread_waits_any_more_is_undone() {
    let (started, events) = start(Then::Serve);
    let (mut thread, _) = started.expect("a thread");
    let (go, undone) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (gone, undoes) = (Arc::clone(&go), Arc::clone(&undone));
    let answer = thread.ask_task_or(
        |_| async move {
            std::future::poll_fn(|cx| {
                cx.waker().wake_by_ref();
                if gone.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        },
        move |_| undoes.store(true, Ordering::Release),
    );
    assert_eq!(answer.wait(|| false), Err(Gone));
    go.store(true, Ordering::Release);
    let limit = soon();
    while !undone.load(Ordering::Acquire) {
        assert!(Instant::now() < limit);
        std::thread::sleep(Duration::from_millis(1));
    }
    thread.ask_to_stop();
    assert!(thread.join(soon(), || {}));
    drop(events);
}

#[test]
fn a_thread_that_is_dropped_ends() {
    let (started, events) = start(Then::Serve);
    drop(started.expect("a thread"));
    assert_eq!(events.iter().collect::<Vec<_>>(), ["ring closed", "queue dropped"]);
}
