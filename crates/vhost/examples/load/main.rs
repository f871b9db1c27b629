//! Loads a vhost-user-blk server as the driver of a guest does, without a guest: what can a server
//! do whose client costs little?
//!
//! Used by `bench/vhost`; works with every server. Prints one line of JSON: I/Os, seconds, CPU of
//! its own threads, kicks (written), calls (the server's writes), waits (reads of the call),
//! batches, and the longest pause between two of them. One thread for each virtqueue. An I/O that
//! fails is counted, and is an error. With `--each` a line for each virtqueue comes first, with
//! what half and 99 % of its requests did not exceed: those of one thread should be alike.
//!
//! Nothing is allocated after the start. All that a thread gets back in one look it sends again
//! together, as a block layer does.

mod arguments;
mod front_end;
mod lane;

use std::process::ExitCode;
use std::sync::Barrier;
use std::time::Duration;

use arguments::Arguments;
use front_end::FrontEnd;
use lane::{Figures, Lane};

fn main() -> ExitCode {
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    match run(&arguments) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            eprintln!("load: {failed} requests failed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("load: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Loads the server. Gives how many requests failed.
fn run(arguments: &Arguments) -> Result<u64, Box<dyn std::error::Error>> {
    let mut front_end = FrontEnd::connect(arguments)?;
    let lanes: Vec<Lane> = (0..arguments.queues)
        .map(|index| front_end.start(arguments, index))
        .collect::<Result<_, _>>()?;
    let barrier = Barrier::new(lanes.len());
    let total = std::thread::scope(|scope| {
        let barrier = &barrier;
        let threads: Vec<_> = lanes
            .into_iter()
            .map(|lane| {
                scope.spawn(move || {
                    barrier.wait();
                    lane.run(arguments)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a thread panicked"))
            .try_fold(Figures::default(), |sum, figures| figures.map(|figures| sum.plus(figures)))
    })?;
    println!("{}", total.json());
    // The connection, the queues and the guest's memory stay as they are: what does a disk cost
    // that nobody uses?
    std::thread::sleep(Duration::from_secs(arguments.hold_s));
    front_end.stop(arguments.queues)?;
    Ok(total.failed)
}
