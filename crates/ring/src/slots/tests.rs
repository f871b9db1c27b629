//! Every order in which a future, the kernel and the next user of a slot can act.

use super::{Completed, Keep, Slots, Waiter};
use crate::IoBuf;

/// What can happen to an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    /// The future is polled.
    Poll,
    /// The future is dropped.
    Drop,
    /// The completion arrives.
    Complete,
}

/// All sequences of `len` steps.
fn sequences(len: u32) -> impl Iterator<Item = Vec<Step>> {
    (0..3usize.pow(len)).map(move |mut code| {
        (0..len)
            .map(|_| {
                let step = [Step::Poll, Step::Drop, Step::Complete][code % 3];
                code /= 3;
                step
            })
            .collect()
    })
}

#[test]
fn memory_is_kept_until_the_completion_in_every_order_of_events() {
    for steps in sequences(5) {
        let mut slots = Slots::new(1);
        let buffer = IoBuf::new(8, 8);
        let held = buffer.clone();
        let slot = slots.take(Keep::Buffer(held)).unwrap();
        let user_data = slots.user_data(slot);
        let (mut future, mut kernel) = (true, true);
        for step in &steps {
            match step {
                Step::Poll if future => {
                    let result = slots.poll(slot, || Waiter::Task(1));
                    assert_eq!(result.is_some(), !kernel, "{steps:?}");
                    future = result.is_none();
                }
                Step::Drop if future => {
                    assert_eq!(slots.abandon(slot), kernel, "{steps:?}");
                    future = false;
                }
                Step::Complete if kernel => {
                    let done = slots.complete(user_data, 8, false);
                    assert!(future || matches!(done, Completed::Nobody), "{steps:?}");
                    kernel = false;
                }
                // What is over cannot happen again; a second completion is stale.
                Step::Complete => {
                    assert!(
                        matches!(slots.complete(user_data, 9, false), Completed::Nobody),
                        "{steps:?}"
                    );
                }
                Step::Poll | Step::Drop => {}
            }
            assert_eq!(
                buffer.is_shared(),
                kernel,
                "{steps:?}: kept exactly while the kernel may write"
            );
            assert_eq!(slots.take(Keep::Nothing).is_err(), kernel || future, "{steps:?}");
            if !(kernel || future) {
                break;
            }
        }
    }
}

#[test]
fn a_late_completion_does_not_touch_the_next_operation_of_the_slot() {
    let mut slots = Slots::new(1);
    let first = slots.take(Keep::Nothing).unwrap();
    let stale = slots.user_data(first);
    slots.complete(stale, 1, false);
    assert_eq!(slots.poll(first, || Waiter::None), Some(1));
    let second = slots.take(Keep::Nothing).unwrap();
    assert!(matches!(slots.complete(stale, 2, false), Completed::Nobody));
    assert_eq!(slots.poll(second, || Waiter::None), None);
}

#[test]
fn an_operation_that_goes_on_keeps_its_slot_and_its_events_add_up() {
    let mut slots = Slots::new(1);
    let slot = slots.take(Keep::Nothing).unwrap();
    let user_data = slots.user_data(slot);
    assert_eq!(slots.poll(slot, || Waiter::Task(1)), None);
    let woken = slots.complete(user_data, 1, true);
    assert!(matches!(woken, Completed::Wake(Waiter::Task(1))));
    slots.complete(user_data, 4, true);
    assert_eq!(slots.pending().count(), 1);
    assert_eq!((slots.take_event(slot), slots.take_event(slot)), (Some(5), None));
    assert_eq!(slots.poll(slot, || Waiter::Task(1)), None, "it goes on");
    // An end that is an error: first what there was.
    slots.complete(user_data, 2, true);
    slots.complete(user_data, -125, false);
    assert_eq!(slots.take_event(slot), None);
    assert_eq!(slots.poll(slot, || Waiter::Task(1)), Some(2));
    assert_eq!(slots.in_flight(), 0);
}

#[test]
fn an_operation_that_nobody_wants_is_over_with_its_last_completion() {
    for event_before in [false, true] {
        let mut slots = Slots::new(1);
        let slot = slots.take(Keep::Nothing).unwrap();
        let user_data = slots.user_data(slot);
        if event_before {
            slots.complete(user_data, 1, true);
        }
        assert!(slots.abandon(slot), "the kernel has it");
        assert!(matches!(slots.complete(user_data, 1, true), Completed::Nobody));
        assert_eq!((slots.in_flight(), slots.pending().count()), (1, 1));
        assert!(slots.take(Keep::Nothing).is_err());
        slots.complete(user_data, -125, false);
        assert_eq!((slots.in_flight(), slots.pending().count()), (0, 0));
    }
}

#[test]
fn slots_are_made_as_they_are_needed_and_used_again_before_more_are() {
    let mut slots = Slots::new(3);
    assert_eq!(slots.slots.len(), 0);
    for _ in 0..2 {
        let taken = [slots.take(Keep::Nothing).unwrap(), slots.take(Keep::Nothing).unwrap()];
        for slot in taken {
            slots.complete(slots.user_data(slot), 0, false);
            assert_eq!(slots.poll(slot, || Waiter::None), Some(0));
        }
        assert_eq!((slots.slots.len(), slots.in_flight()), (2, 0));
    }
    let all: Vec<u32> = (0..3).map(|_| slots.take(Keep::Nothing).unwrap()).collect();
    assert!(slots.take(Keep::Nothing).is_err());
    assert_eq!((all.len(), slots.pending().count()), (3, 3));
}
