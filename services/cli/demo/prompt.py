"""The demonstration's prompt: a page and a question, long enough for its prefill to show."""

PROMPT = """\
You are the assistant of a small hydroelectric station. Read the station's handbook and answer \
the question at its end in one sentence.

1. The forebay is the pool in front of the turbines. Water arrives there from the canal, loses \
its speed, drops its sand, and waits. Nothing is generated in the forebay itself, yet whoever \
runs it badly runs the whole station badly, since each turbine can only use the water that \
stands ready at its own gate. The keeper of the forebay therefore knows at every moment how much \
water stands in front of which gate, how busy each turbine is, and how long the canal needs to \
bring more.

2. When a load is announced, the keeper decides which turbine takes it. The new keeper's mistake \
is to go round in a circle, one turbine after the other. It looks just, and it spreads the work \
evenly. But a turbine whose gate stands dry must first be filled from the canal, and until then \
the load waits. The old keeper looks first at where water already stands. If the second turbine \
has a full bay, it takes the load at once, even when it was the second turbine's turn a moment \
ago. Only when that turbine is so busy that filling another bay would be faster does the keeper \
open another gate.

3. Water that stands in a bay is never thrown away without need. When the bays are full and new \
water must come in, the keeper lets down the bay that was not used for the longest time. Below \
the bays lie two more basins: a deep one beside the station, which is larger and a little \
slower, and a lake far off, which is larger still and much slower. Water that was let down into \
a basin can be pumped up again, and the keeper does so whenever pumping is faster than waiting \
for the canal. When it is not, the pumps stand still: a pump that is slower than the canal only \
costs money.

4. The keeper writes down what was expected and what came. If a bay was thought to be full and \
turned out to be half empty, the difference goes into the book, and a keeper whose book shows \
many such differences is looking at a broken gauge, not at bad luck. A gauge may be wrong for an \
hour. The water itself is checked each time before it reaches a turbine: sand in the water \
breaks the blades.

5. If a turbine stops in the middle of a load, another takes over where it stopped, and the \
customer sees the lamps flicker at most. If the keeper falls ill, a second keeper, who has \
watched the same gauges all the time, goes on at once. No list has to be handed over, because \
the gauges are the list.

6. Visitors ask why the station does not simply build larger turbines. The answer hangs framed \
in the hall: the river is what it is, the canal is what it is, and most customers ask for the \
same things again and again. A station that remembers what it has already lifted has to lift \
only the rest.

Question: according to the handbook, where does the old keeper look first when a load is \
announced?
"""
