//! Places that are given back while others are taken.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::*;

/// A wake-up that takes so long is lost.
const LOST: Duration = Duration::from_secs(20);
/// Rounds of a race at most, and how long they may take together.
const ROUNDS: usize = 20_000;
const ROUNDS_TIME: Duration = Duration::from_secs(2);

/// Those that wait for places: each has a mailbox, as a queue thread has.
struct Crowd {
    mailboxes: Vec<Sender<()>>,
    begun: AtomicUsize,
}

impl Crowd {
    fn new(count: usize) -> (Crowd, Vec<Receiver<()>>) {
        let (mailboxes, receivers) = (0..count).map(|_| channel()).unzip();
        (Crowd { mailboxes, begun: AtomicUsize::new(0) }, receivers)
    }

    /// Returns when all of them and the one that leaves have come here.
    fn start_together(&self) {
        self.begun.fetch_add(1, Ordering::AcqRel);
        while self.begun.load(Ordering::Acquire) <= self.mailboxes.len() {
            std::thread::yield_now();
        }
    }

    /// What a leaver does that is told so.
    fn wake(&self) {
        for mailbox in &self.mailboxes {
            let _ = mailbox.send(());
        }
    }
}

/// Looks for a place, and waits for messages while there is none.
fn until_taken(messages: &Receiver<()>, mut take: impl FnMut() -> bool) {
    while !take() {
        messages.recv_timeout(LOST).expect("there is a place, and nobody says so");
    }
}

/// Repeats a race, for a bounded time.
fn again_and_again(mut race: impl FnMut()) {
    let begun = Instant::now();
    for _ in 0..ROUNDS {
        race();
        if begun.elapsed() > ROUNDS_TIME {
            return;
        }
    }
}

/// One leaves, of three that may be there, while three others come on two threads. A leaver that
/// looks first, sees room, and only then leaves would wake nobody.
#[test]
fn a_place_that_is_given_back_while_others_are_taken_is_found() {
    again_and_again(|| {
        let places = Places::new(3, 100, 1);
        assert!(places.try_use(None));
        let (crowd, receivers) = Crowd::new(2);
        std::thread::scope(|scope| {
            for (messages, count) in receivers.into_iter().zip([2, 1]) {
                let (places, crowd) = (&places, &crowd);
                scope.spawn(move || {
                    crowd.start_together();
                    (0..count).for_each(|_| until_taken(&messages, || places.try_use(None)));
                });
            }
            crowd.start_together();
            if places.end_use() {
                crowd.wake();
            }
        });
        assert!(places.is_used_up());
    });
}

/// The same for sockets, which one thread takes and two others give back.
#[test]
fn a_socket_that_is_given_back_while_others_are_taken_is_found() {
    again_and_again(|| {
        let places = Places::new(100, 3, 2);
        places.take(0);
        places.take(1);
        let (crowd, receivers) = Crowd::new(1);
        // The second one that leaves has no part in the start: it comes at any time.
        std::thread::scope(|scope| {
            let (places, crowd) = (&places, &crowd);
            for messages in receivers {
                scope.spawn(move || {
                    let accept = || {
                        let has_room = !places.is_full();
                        if has_room {
                            places.take(places.emptiest());
                        }
                        has_room
                    };
                    crowd.start_together();
                    (0..3).for_each(|_| until_taken(&messages, accept));
                });
            }
            let leave = |thread| {
                if places.leave(thread) {
                    crowd.wake();
                }
            };
            scope.spawn(move || leave(1));
            crowd.start_together();
            leave(0);
        });
        assert_eq!((places.connections(), places.is_full()), (3, true));
    });
}

#[test]
fn only_those_who_leave_where_there_was_no_room_are_told() {
    let places = Places::new(2, 3, 1);
    assert!(places.try_use(None) && places.try_use(None) && !places.try_use(None));
    assert_eq!([places.end_use(), places.end_use()], [true, false]);
    (0..3).for_each(|_| places.take(0));
    assert_eq!([places.leave(0), places.leave(0), places.leave(0)], [true, false, false]);
}

#[test]
fn a_client_that_has_just_come_does_not_overtake_those_that_wait() {
    let places = Places::new(1, 9, 1);
    assert!(places.try_use(None));
    let (first, second) = (places.wait_in_line(), places.wait_in_line());
    assert!(!places.try_use(Some(&first)));
    assert!(places.end_use());
    assert!(!places.try_use(None) && !places.try_use(Some(&second)));
    assert!(places.try_use(Some(&first)));
    drop(first);
    assert!(places.end_use());
    assert!(!places.try_use(None));
    drop(second);
    assert!(places.try_use(None), "one that has gone keeps nobody waiting");
}

#[test]
fn handshakes_hurry_until_nobody_waits_for_them() {
    let places = Places::new(1, 2, 1);
    let (first, second) = (places.hurry(), places.hurry());
    drop(first);
    assert!(places.is_crowded());
    drop(second);
    assert!(!places.is_crowded());
}

/// Few descriptors: the clients that use the export leave none for handshakes.
#[test]
fn fewer_sockets_than_clients_that_may_use_the_export() {
    let places = Places::new(3, 1, 1);
    places.take(0);
    assert!(places.is_full() && !places.is_used_up() && !places.all_sockets_are_in_use());
    assert!(places.try_use(None));
    assert!(places.is_full() && !places.is_used_up() && places.all_sockets_are_in_use());
}
