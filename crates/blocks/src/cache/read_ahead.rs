//! Which blocks a sequential reader will want next. Pure.

/// Readers of one layer that are told apart.
const STREAMS: usize = 4;
const FIRST: u32 = 2;
/// 2 MiB.
const MOST: u32 = 16;

#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    streams: [Option<Stream>; STREAMS],
    turn: usize,
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    last: u32,
    window: u32,
    /// First block that hasn't been asked for ahead.
    frontier: u32,
}

/// What a read means.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Whether it goes to another block than its stream's last read.
    pub(crate) visit: bool,
    /// Blocks to fetch ahead.
    pub(crate) ahead: std::ops::Range<u32>,
}

impl ReadAhead {
    /// A read of blocks `first..=last` of a layer of `count` blocks.
    pub(crate) fn step(&mut self, first: u32, last: u32, count: u32) -> Step {
        let follows = |s: &Stream| first == s.last || Some(first) == s.last.checked_add(1);
        let known = self.streams.iter_mut().flatten().find(|stream| follows(stream));
        let Some(stream) = known else {
            self.streams[self.turn] = Some(Stream { last, window: 0, frontier: last.saturating_add(1) });
            self.turn = (self.turn + 1) % STREAMS;
            return Step { visit: true, ahead: 0..0 };
        };
        if last == stream.last {
            return Step { visit: false, ahead: 0..0 };
        }
        stream.last = last;
        stream.window = (stream.window * 2).clamp(FIRST, MOST);
        let from = stream.frontier.max(last.saturating_add(1));
        // Asked for in halves of the window: fewer, larger requests.
        if from - last > stream.window / 2 + 1 {
            return Step { visit: true, ahead: 0..0 };
        }
        let to = last.saturating_add(1 + stream.window).min(count);
        stream.frontier = from.max(to);
        Step { visit: true, ahead: from..to.max(from) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequential_reader_gets_each_block_ahead_once_up_to_the_end() {
        let mut ahead = ReadAhead::default();
        let mut fetched = Vec::new();
        for block in 0..100 {
            for _ in 0..32 {
                let step = ahead.step(block, block, 100);
                assert!(block < 2 || step.ahead.is_empty() || step.ahead.end - block <= MOST + 1);
                fetched.extend(step.ahead);
            }
        }
        assert_eq!(fetched, (2..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_random_reader_gets_nothing_ahead() {
        let mut ahead = ReadAhead::default();
        for n in 0..1000u32 {
            let block = n.wrapping_mul(7919) % 10_000;
            assert!(ahead.step(block, block, 10_000).ahead.is_empty());
        }
    }

    #[test]
    fn readers_side_by_side_are_told_apart() {
        let mut ahead = ReadAhead::default();
        let mut fetched = [Vec::new(), Vec::new()];
        for n in 0..40 {
            fetched[0].extend(ahead.step(n, n, 1000).ahead);
            fetched[1].extend(ahead.step(500 + n, 500 + n, 1000).ahead);
        }
        assert_eq!(fetched[0][..30], (2..32).collect::<Vec<_>>());
        assert_eq!(fetched[1][..30], (502..532).collect::<Vec<_>>());
    }
}
