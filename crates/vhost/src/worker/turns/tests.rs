use ringdisk_testkit::sim::Prng;

use super::Turns;

/// Virtqueues with requests, and room for some.
struct Model {
    turns: Turns,
    waiting: Vec<u64>,
    served: Vec<u64>,
}

impl Model {
    fn new(count: usize) -> Model {
        Model { turns: Turns::default(), waiting: vec![0; count], served: vec![0; count] }
    }

    /// One batch. Returns which virtqueues were served.
    fn batch(&mut self, room: u32) -> Vec<bool> {
        let before = self.served.clone();
        let expected = self.waiting.iter().sum::<u64>().min(u64::from(room));
        let (waiting, served) = (&mut self.waiting, &mut self.served);
        let taken = self.turns.take(waiting.len(), room, |number| {
            let has_one = waiting[number] > 0;
            waiting[number] -= u64::from(has_one);
            served[number] += u64::from(has_one);
            has_one
        });
        assert_eq!(u64::from(taken), expected, "what there is room for is taken");
        before.iter().zip(&self.served).map(|(before, after)| before < after).collect()
    }
}

#[test]
fn a_virtqueue_waits_for_as_many_batches_as_there_are_virtqueues_at_most() {
    for seed in 0..400 {
        let mut prng = Prng::new(seed);
        let count = 1 + prng.below(40);
        let mut model = Model::new(usize::try_from(count).expect("small"));
        let mut waited = vec![0; model.waiting.len()];
        for _ in 0..300 {
            for waiting in &mut model.waiting {
                // Some always have more than there is room for, some have one now and then.
                *waiting += match prng.below(6) {
                    0 => 1000,
                    1 => 1,
                    _ => 0,
                };
            }
            let room = u32::try_from(prng.below(33)).expect("small");
            let had: Vec<bool> = model.waiting.iter().map(|waiting| *waiting > 0).collect();
            let served = model.batch(room);
            for (number, waited) in waited.iter_mut().enumerate() {
                *waited =
                    if !had[number] || served[number] { 0 } else { *waited + u64::from(room > 0) };
                assert!(*waited < count, "seed {seed}: virtqueue {number} of {count} waits");
            }
        }
    }
}

#[test]
fn virtqueues_that_are_never_empty_get_the_same() {
    for count in 1..40 {
        for room in 1..=32 {
            let mut model = Model::new(count);
            model.waiting.fill(u64::MAX / 64);
            for _ in 0..100 * count {
                model.batch(room);
            }
            let least = model.served.iter().min().expect("one");
            let most = model.served.iter().max().expect("one");
            assert!(most - least <= u64::from(room), "{count} {room}: {:?}", model.served);
        }
    }
}

#[test]
fn one_request_beside_a_virtqueue_that_is_never_empty_is_in_the_next_batch_but_one() {
    for room in [1, 7, 32, 100] {
        let mut model = Model::new(2);
        for _ in 0..100 {
            model.waiting[0] = 1000;
            model.waiting[1] = 1;
            let served = model.batch(room)[1] || model.batch(room)[1];
            assert!(served, "room for {room}");
        }
    }
}
